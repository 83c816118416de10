"""Batches depend on the step, the seed and the text; on no mesh, no history, no process."""
import hashlib
import os
import platform
import subprocess
import sys

import numpy as np
import pytest

from jaxpara.config import Run
from jaxpara.data import Loader
from jaxpara.errors import ConfigError


@pytest.fixture
def run(tmp_path):
    """A run over 20 files, 8 rows of 32 tokens a step."""
    for n in range(20):
        (tmp_path / f"{n}.txt").write_text(f"file {n}: " + "word " * (7 * n % 40))
    return Run().change(data=dict(path=str(tmp_path)), train=dict(batch=8, seq=32, seed=4))


def digest(loader, steps=range(12)):
    parts = [loader.batch(step)[name].tobytes() for step in steps for name in ("tokens", "targets", "segments", "positions")]
    return hashlib.sha256(b"".join(parts)).hexdigest()


MESHES = [dict(dp=2), dict(fsdp=4, tp=2), dict(sp=4), dict(dp="auto")]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_same_batches_on_every_mesh(run, mesh):
    assert digest(Loader(run.change(mesh=mesh, parallel=dict(sp_order="zigzag")))) == digest(Loader(run))


def test_the_mesh_is_not_even_looked_at(run):
    class Blind:
        def __getattr__(self, name):
            assert name in ("data", "model", "train"), f"the loader looked at run.{name}"
            return getattr(run, name)

    assert digest(Loader(Blind())) == digest(Loader(run))


@pytest.mark.parametrize("change", [dict(seed=5), dict(batch=4), dict(seq=16)], ids=str)
def test_what_does_change_batches(run, change):
    assert digest(Loader(run.change(train=change))) != digest(Loader(run))


def test_batches_do_not_depend_on_history(run):
    used, fresh = Loader(run), Loader(run)
    for step in (0, 11, 3, 4, 3):
        used.batch(step)
    assert digest(used, [5]) == digest(fresh, [5])
    assert digest(used, [5]) != digest(used, [6])


@pytest.mark.parametrize("batch, other", [(8, 4), (8, 2)])
def test_rows_follow_each_other_whatever_the_batch(run, batch, other):
    whole = Loader(run.change(train=dict(batch=batch))).batch(3)
    parts = Loader(run.change(train=dict(batch=other)))
    steps = range(3 * batch // other, 4 * batch // other)
    for name, rows in whole.items():
        assert rows.shape == (batch, 32) and rows.dtype == np.int32
        np.testing.assert_array_equal(np.concatenate([parts.batch(step)[name] for step in steps]), rows)


def test_other_processes_read_the_same_without_jax(run):
    program = """
import sys
from jaxpara.config import Run
from jaxpara.data import Loader
sys.path.insert(0, sys.argv[2])
from test_loader import digest
loader = Loader(Run().change(data=dict(path=sys.argv[1]), train=dict(batch=8, seq=32, seed=4)))
print(digest(loader), "jax" in sys.modules)
"""
    for salt in ("1", "2"):
        answer = subprocess.run([sys.executable, "-c", program, run.data.path, os.path.dirname(__file__)], text=True, check=True,
                                capture_output=True, env=os.environ | {"PYTHONHASHSEED": salt}).stdout.split()
        assert answer == [digest(Loader(run)), "False"]


def test_counts_and_names(run):
    loader = Loader(run)
    sizes = [file.stat().st_size for file in os.scandir(run.data.path)]
    assert (loader.documents, loader.tokens) == (20, sum(sizes) + 20)
    assert loader.source == f"{run.data.path}, 20 files"


def test_where_names_the_rows_and_epochs(run):
    loader = Loader(run)
    rows = loader.tokens // 32
    assert rows > 40 and rows % 8
    crossing = rows // 8
    assert loader.where(3) == f"rows 24 to 31 of the stream, epoch 0 (of {rows} rows)"
    assert loader.where(crossing) == f"rows {crossing * 8} to {crossing * 8 + 7} of the stream, epochs 0 to 1 (of {rows} rows)"
    assert loader.where(crossing + 1).endswith(f"epoch 1 (of {rows} rows)")


def test_standard_library_by_default():
    loader = Loader(Run())
    assert loader.tokens > 1_000_000 and loader.documents > 100
    assert loader.source == f"Python {platform.python_version()} standard library, {loader.documents} files"
    batch = loader.batch(0)
    assert batch["tokens"].shape == (8, 128)
    assert batch["tokens"].min() >= 0 and batch["tokens"].max() < 256
    assert (batch["targets"] >= 0).mean() > 0.9
    assert digest(loader) == digest(Loader(Run()))


def test_vocabulary_too_small(run):
    Loader(run.change(model=dict(vocab=256)))
    with pytest.raises(ConfigError, match=r"model\.vocab = 97 is too small for data\.tokenizer = byte, which has 256 tokens\. Legal: 256 or more\."):
        Loader(run.change(model=dict(vocab=97)))


def test_text_shorter_than_a_row(run, tmp_path):
    (tmp_path / "one.txt").write_text("x" * 30)
    path = str(tmp_path / "one.txt")
    with pytest.raises(ConfigError, match=r"train\.seq = 32 .* 31 tokens .*up to 31"):
        Loader(run.change(data=dict(path=path)))
    assert Loader(run.change(data=dict(path=path), train=dict(seq=31))).batch(0)["tokens"].shape == (8, 31)
