"""Where the text comes from: a list of documents in an order that does not depend on the file system."""
import os
import platform
from pathlib import Path

from jaxpara.errors import ConfigError

NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Folders below the standard library that hold installed packages, tests or caches."""

HEAD = 8192
"""Bytes at the start of a file in which a NUL marks it as binary."""


def documents(path=None):
    """The documents at `path`, one per file: list of str, none of them empty, in the order of the files' relative paths.

    path: a text file; a folder, of which every text file is read (hidden and binary ones are not); None: the Python source of
    the running interpreter's standard library. Bytes that are not UTF-8 become U+FFFD; line ends stay as they are.
    Raises ConfigError when nothing is at `path`, when it cannot be read, and when it holds no text.
    """
    if path is None:
        root = Path(os.__file__).parent
        found = [file for file in _files(root, NOT_LIBRARY) if file.suffix == ".py"]
    else:
        root = Path(path)
        if not root.exists():
            raise ConfigError(f"data.path = {path}: there is no such file or folder (seen from {Path.cwd()}).")
        found = _files(root) if root.is_dir() else [root] * root.is_file()
    texts = [text for text in map(_text, found) if text]
    if not texts:
        raise ConfigError(_no_text(path, root, len(found)))
    return texts


def describe(path, count):
    """A short name of what `documents(path)` read, for people; count: how many documents it gave."""
    files = f"{count} file{'s' * (count != 1)}"
    if path is None:
        return f"Python {platform.python_version()} standard library, {files}"
    return f"{path}, {files}" if Path(path).is_dir() else str(path)


def _files(root, skipped=frozenset()):
    """Every file below the folder `root` that is not hidden, sorted; folders that are hidden or named in `skipped` are not entered."""
    found = []
    for folder, folders, names in os.walk(root, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(filter(Path.is_file, found), key=lambda file: file.relative_to(root).as_posix())


def _text(file):
    """The text of a file; "" for a binary one."""
    try:
        with open(file, "rb") as opened:
            head = opened.read(HEAD)
            content = b"" if b"\0" in head else head + opened.read()
    except OSError as error:
        _refuse(error)
    return content.decode("utf-8", errors="replace")


def _refuse(error):
    raise ConfigError(f"data.path: {error.filename} cannot be read: {error.strerror}.") from error


def _no_text(path, root, count):
    if path is None:
        return f"This Python's standard library has no source files in {root}: set data.path to a file or folder of text."
    binary = f"binary (a NUL byte in the first {HEAD} bytes; UTF-16 text looks so: save it as UTF-8)"
    if root.is_dir():
        return f"data.path = {path} holds no text: of its {count} files that are not hidden, each is empty or {binary}."
    return f"data.path = {path} holds no text: it is empty, not a regular file, or {binary}."
