"""What is read from where, and what is said when there is nothing."""
import os
from pathlib import Path

import pytest

from jaxpara.data import sources
from jaxpara.data.sources import describe, documents
from jaxpara.errors import ConfigError


def write(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def test_folder(tmp_path):
    write(tmp_path, {
        "b.txt": b"second\r\n", "a/z.md": b"first", "c": b"fifth", "b/y.txt": b"third", "b/deep/x.py": b"\xff0",
        "empty.txt": b"", ".hidden": b"hidden", ".git/config": b"hidden too", "image.png": b"\x89PNG\0\0", "late.bin": b"a" * 8191 + b"\0",
    })
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    assert documents(str(tmp_path)) == ["first", "second\r\n", "\ufffd0", "third", "fifth"]


def test_order_is_the_paths_not_the_file_systems(tmp_path, monkeypatch):
    names = ["m.txt", "a/k.txt", "z/b.txt", "a.txt", "z/a.txt"]
    write(tmp_path, {name: name.encode() for name in names})
    walk = os.walk

    def backwards(*arguments, **options):
        for folder, folders, files in walk(*arguments, **options):
            folders.sort(reverse=True)
            yield folder, folders, sorted(files, reverse=True)

    forwards = documents(tmp_path)
    monkeypatch.setattr(sources.os, "walk", backwards)
    assert documents(tmp_path) == forwards == sorted(names)


def test_one_file_even_a_hidden_one(tmp_path):
    write(tmp_path, {".notes": b"caf\xc3\xa9"})
    assert documents(tmp_path / ".notes") == ["café"]


def test_nul_after_the_head_is_text(tmp_path):
    write(tmp_path, {"long.txt": b"a" * 8192 + b"\0b"})
    assert documents(tmp_path)[0].endswith("a\0b")


def test_hidden_parent_of_the_folder_does_not_hide_it(tmp_path):
    write(tmp_path, {".cache/text/a.txt": b"seen"})
    assert documents(tmp_path / ".cache/text") == ["seen"]


def test_standard_library():
    texts = documents()
    assert sum(map(len, texts)) > 1_000_000
    assert all(texts)
    assert Path(os.__file__).read_bytes().decode() in texts
    assert documents() == texts


def test_standard_library_without_packages_and_tests(tmp_path, monkeypatch):
    write(tmp_path, {
        "os.py": b"os", "json/__init__.py": b"json", "unittest/case.py": b"case", "README.txt": b"not Python", "empty.py": b"",
        "test/test_os.py": b"no", "json/tests/test_json.py": b"no", "idlelib/idle_test/test_x.py": b"no",
        "site-packages/numpy/a.py": b"no", "dist-packages/b.py": b"no", "__pycache__/c.py": b"no",
    })
    monkeypatch.setattr(sources.os, "__file__", str(tmp_path / "os.py"))
    assert documents() == ["json", "os", "case"]


def test_standard_library_without_source(tmp_path, monkeypatch):
    monkeypatch.setattr(sources.os, "__file__", str(tmp_path / "os.pyc"))
    with pytest.raises(ConfigError, match=r"no source files in .*set data\.path"):
        documents()
    monkeypatch.setattr(sources.os, "__file__", str(tmp_path / "python.zip" / "os.pyc"))
    with pytest.raises(ConfigError, match="python.zip cannot be read"):
        documents()


def test_missing_path(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.path = .*nothing_here: there is no such file or folder \(seen from /"):
        documents(tmp_path / "nothing_here")


@pytest.mark.parametrize("content", [b"", b"h\0e\0l\0l\0o\0"])
def test_no_text(tmp_path, content):
    write(tmp_path, {"a.txt": content})
    with pytest.raises(ConfigError, match=r"data\.path = .*a\.txt holds no text: it is empty, .* or binary"):
        documents(tmp_path / "a.txt")
    with pytest.raises(ConfigError, match="holds no text: of its 1 files"):
        documents(tmp_path)


def test_a_device_is_not_read():
    with pytest.raises(ConfigError, match="not a regular file"):
        documents("/dev/zero")


def test_unreadable_file(tmp_path, monkeypatch):
    write(tmp_path, {"a.txt": b"text"})

    def refuse(file, mode):
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(sources, "open", refuse, raising=False)
    with pytest.raises(ConfigError, match=r"data\.path: .*a\.txt cannot be read: Permission denied\."):
        documents(tmp_path)


def test_descriptions(tmp_path):
    write(tmp_path, {"a.txt": b"text"})
    assert describe(tmp_path, 1) == f"{tmp_path}, 1 file"
    assert describe(tmp_path / "a.txt", 1) == f"{tmp_path}/a.txt"
    assert describe(None, 742).startswith("Python 3.") and describe(None, 742).endswith(" standard library, 742 files")
