"""Every mesh of the matrix trains the same model as one device: loss, gradient norm, every gradient leaf, parameters after 3 steps."""
import os
from functools import cache

import numpy as np
import pytest

import jaxpara
from equivalence.hard import awake, error, hard_batch, make_run
from equivalence.matrix import CASES, on_one_device, settings

def rotating(cases, parts):
    """The cases as pytest parameters, all but one in `parts` marked slow; which one, ROTATION says."""
    today = int(os.environ.get("ROTATION", 0)) % parts
    return [case if i % parts == today else pytest.param(case, marks=pytest.mark.slow) for i, case in enumerate(cases)]


LIMIT = {"float64": 1e-9, "float32": 1e-5}


def train(overrides, packed, dtype, optimizer, start=None):
    """(first metrics, first gradients or None, parameters after 3 steps, parameters before).

    With plain SGD at rate 1 the first step *is* the gradient: exact enough in float64; float32 asks `loss_and_grads`.
    """
    program = jaxpara.build(make_run(overrides, dtype, optimizer))
    start = awake(program.params(program.init())) if start is None else start
    batch, state = hard_batch(packed), program.init(start)
    before, first, grads = program.params(state), None, None
    if (dtype, optimizer) == ("float32", "sgd"):
        grads = program.loss_and_grads(state, batch)[1]
    for i in range(3):
        state, metrics = program.step(state, batch)
        if i == 0:
            first, after = dict(metrics.items()), program.params(state)
            if (dtype, optimizer) == ("float64", "sgd"):
                grads = {path: before[path] - after[path] for path in before}
    return first, grads, program.params(state), before


@cache
def reference(model, packed, dtype, optimizer):
    return train(dict(model), packed, dtype, optimizer)


def compare(case, dtype, optimizer, extra=None):
    overrides, packed = settings(case)
    expected = reference(tuple(sorted(on_one_device(overrides).items())), packed, dtype, optimizer)
    first, grads, params, _ = train({**overrides, **(extra or {})}, packed, dtype, optimizer, expected[3])
    for name in ("loss", "grad_norm"):
        assert abs(first[name] - expected[0][name]) <= LIMIT[dtype] * abs(expected[0][name]), (name, first[name], expected[0][name])
    assert first["tokens"] == expected[0]["tokens"]
    if optimizer == "sgd":
        assert error(grads, expected[1])[0] < LIMIT[dtype], error(grads, expected[1])
    assert error(params, expected[2])[0] < LIMIT[dtype], error(params, expected[2])
    assert error(params, expected[3])[0] > 1e-3, "three steps moved nothing: the comparison would be of two initialisations"


@pytest.mark.parametrize("case", rotating(CASES, 2))
def test_float64_sgd(case):
    """Every other case one day, the rest the next; all with --all."""
    compare(case, "float64", "sgd")


@pytest.mark.parametrize("case", rotating(CASES, 5))
def test_float64_adamw(case):
    """A fifth of the cases at a time: scripts/test.sh takes another fifth each day, and all with --all."""
    compare(case, "float64", "adamw")


@pytest.mark.parametrize("case", rotating(CASES, 5))
def test_float32_sgd(case):
    """A fifth at a time. Manual cases run in the unchecked mode here: both modes of shard_map get every mesh."""
    overrides, packed = settings(case)
    manual = overrides.get("parallel.lowering") != "annotated"
    compare(case, "float32", "sgd", {"parallel.check_vma": False} if manual else {})


def test_the_matrix_is_wide_enough():
    runs = [make_run(settings(case)[0]) for case in CASES]
    assert len(CASES) >= 40 and len(set(CASES)) == len(CASES)
    for style in ("gpt2", "llama"):
        assert sum(run.model.style == style for run in runs) >= 15
    for stage in range(4):
        for m in (1, 3):
            assert any(run.parallel.zero.dp == stage and run.mesh.dp == 8 and run.train.microbatches == m for run in runs)
    for kind in ("ring", "ulysses", "allgather", "hybrid"):
        for packed in (True, False):
            assert any(run.mesh.sp > 1 and run.parallel.sp_kind == kind and settings(case)[1] == packed for run, case in zip(runs, CASES))
    assert any(run.model.kv_heads < run.mesh.tp for run in runs)
    assert {run.parallel.lowering for run in runs} == {"manual", "annotated"}


def test_loss_and_grads_is_the_gradient_of_the_step():
    """The public gradients are those that the first SGD step shows, and the reported norm is theirs."""
    overrides, packed = settings("llama fsdp2 sp2 tp2 zigzag megatron")
    program = jaxpara.build(make_run(overrides, "float64", "sgd"))
    first, stepped, _, start = train(overrides, packed, "float64", "sgd")
    loss, grads = program.loss_and_grads(program.init(start), hard_batch(packed))
    assert error(stepped, grads)[0] < 1e-9
    assert abs(np.sqrt(sum((leaf ** 2).sum() for leaf in grads.values())) / first["grad_norm"] - 1) < 1e-12
    assert abs(loss / first["loss"] - 1) < 1e-12
