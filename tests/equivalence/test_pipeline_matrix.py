"""Every pipeline of the matrix trains the same model as one device, under each schedule: see `test_matrix`.

Every day runs one small case of each kind in float64 with SGD, a sixteenth of the others, and a thirtieth of all with AdamW and in float32.
"""
from functools import cache

import pytest

from equivalence.hard import make_run
from equivalence.matrix import PIPELINES, SMALLEST, settings
from equivalence.test_matrix import compare, rotating
from jaxpara.pipeline import KINDS
from jaxpara.pipeline.placing import divergent, schedule, stack


@pytest.mark.parametrize("case", SMALLEST + rotating(PIPELINES[len(SMALLEST):], 16))
def test_float64_sgd(case):
    compare(case, "float64", "sgd")


@pytest.mark.parametrize("case", rotating(PIPELINES, 30))
def test_float64_adamw(case):
    compare(case, "float64", "adamw")


@pytest.mark.parametrize("case", rotating(PIPELINES, 30))
def test_float32_sgd(case):
    """In the unchecked mode of shard_map."""
    compare(case, "float32", "sgd", {"parallel.check_vma": False})


@cache
def runs():
    return [make_run(settings(case)[0]) for case in PIPELINES]


WANTED = {
    "pp2·dp2·tp2": lambda run: run.mesh.text == "pp2·dp2·tp2",
    "pp2·fsdp2·sp2 in a ring": lambda run: run.mesh.text == "pp2·fsdp2·sp2" and run.parallel.sp_kind == "ring",
    "pp2·fsdp2·sp2 by Ulysses": lambda run: run.mesh.text == "pp2·fsdp2·sp2" and run.parallel.sp_kind == "ulysses",
    "pp4·tp2": lambda run: run.mesh.text == "pp4·tp2",
    "pp2·sp2·tp2": lambda run: run.mesh.text == "pp2·sp2·tp2",
    "tp_sequence": lambda run: run.parallel.tp_sequence,
    "dropout": lambda run: run.model.dropout > 0,
    "padding": lambda run: stack(run).padded and run.parallel.layers_per_stage is None,
    "layers as given": lambda run: run.parallel.layers_per_stage is not None,
    "tied GPT-2": lambda run: run.model.style == "gpt2" and run.model.tied,
    "untied GPT-2": lambda run: run.model.style == "gpt2" and not run.model.tied,
    "two chunks": lambda run: schedule(run).chunks == 2,
    "m = p": lambda run: run.train.microbatches == run.mesh.pp,
    "m > p, not a multiple": lambda run: run.train.microbatches > run.mesh.pp and run.train.microbatches % run.mesh.pp,
    "m < p": lambda run: run.train.microbatches < run.mesh.pp,
    "recomputation": lambda run: run.parallel.remat == "full",
    "gathered once": lambda run: run.parallel.gather_once,
    "two-step scatters": lambda run: run.parallel.scatter_inner,
    "a window": lambda run: run.model.window,
    "hybrid": lambda run: run.parallel.sp_kind == "hybrid",
    "allgather": lambda run: run.parallel.sp_kind == "allgather",
    "few KV heads": lambda run: run.model.kv_heads < run.mesh.tp,
    **{f"ZeRO-{stage} over {axis}": lambda run, stage=stage, axis=axis: run.mesh.sizes[axis] > 1 and getattr(run.parallel.zero, axis) == stage
       for axis in ("pp", "dp") for stage in range(4)},
}
"""What both the scan and the tables must be tried with."""


def test_the_pipelines_are_wide_enough():
    missing = [(what, kind) for what, holds in WANTED.items() for kind, tables in (("scan", False), ("tables", True))
               if not any(divergent(run) == tables and holds(run) for run in runs())]
    assert not missing


def test_each_schedule_has_each_size():
    cases = [(run.parallel.schedule, run.mesh.pp) for run in runs()]
    assert len(set(PIPELINES)) == len(PIPELINES) >= 40
    assert all(sum(case == (kind, pp) for case in cases) >= 1 for kind in KINDS for pp in (2, 4))
    assert {run.parallel.schedule for run in runs()[:len(SMALLEST)]} == set(KINDS), "each kind, every day"
    split = [run for run in runs() if divergent(run) and schedule(run).split]
    assert any(run.parallel.remat == "full" for run in split) and any(run.parallel.gather_once for run in split)
    assert any(run.model.dropout for run in split) and any(run.parallel.tp_sequence and run.mesh.sp > 1 for run in split)
    chunks = {(run.parallel.schedule, schedule(run).chunks) for run in runs()}
    assert {("circular", 2), ("circular", 3), ("interleaved", 2), ("interleaved", 3)} <= chunks
    few = {run.parallel.schedule for run in runs() if run.train.microbatches < run.mesh.pp}
    assert few == {"gpipe", "1f1b", "circular"}, "the kinds that take fewer micro-batches than stages"
    orders = {(divergent(run), run.parallel.sp_order) for run in runs() if run.mesh.sp > 1}
    assert {(False, "zigzag"), (True, "zigzag"), (True, "striped")} <= orders
    assert any(not run.parallel.remat_tick for run in runs()) and {run.parallel.remat for run in runs()} == {"none", "full", "selective"}
    assert {run.model.style for run in runs() if run.model.tied} == {"gpt2", "llama"}
    assert all(any(run.mesh.sizes[axis] > 1 and getattr(run.parallel.zero, axis) == 3 for run in runs()) for axis in ("sp", "fsdp"))
