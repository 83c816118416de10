"""Every mesh of the matrix trains the same model with experts as one device: what `test_matrix` compares, and every decision of the routers.

Every day runs the smallest cases and a tenth of the others in float64 with SGD, and a sixteenth of all with AdamW and in float32.
"""
from functools import cache

import numpy as np
import pytest

import jaxpara
from equivalence.hard import awake, error, hard_batch, make_run
from equivalence.matrix import EXPERTS, ROUTED_SMALLEST, on_one_device, settings
from equivalence.test_matrix import LIMIT, rotating
from jaxpara.experts import spanning


def train(overrides, packed, dtype, optimizer, start=None):
    """What three steps show: metrics and loads of each, parameters before and after, the routers' bias after; in float64 under SGD at rate 1 the first
    gradients, which are its first update, and what the routers decide before and after; in float32 gradients alone."""
    program = jaxpara.build(make_run(overrides, dtype, optimizer))
    start = awake(program.params(program.init())) if start is None else start
    batch, state = hard_batch(packed), program.init(start)
    exact, told = (dtype, optimizer) == ("float64", "sgd"), {"metrics": [], "loads": []}
    told["before"] = program.params(state)
    told["routing"] = [program.routing(state, batch)] if exact else []
    if (dtype, optimizer) == ("float32", "sgd"):
        told["grads"] = program.loss_and_grads(state, batch)[1]
    for i in range(3):
        state, metrics = program.step(state, batch)
        told["metrics"].append(dict(metrics.items()))
        told["loads"].append(metrics.load)
        if exact and i == 0:
            after = program.params(state)
            told["grads"] = {path: told["before"][path] - after[path] for path in after}
    told["routing"] += [program.routing(state, batch)] if exact else []
    return told | {"after": program.params(state), "bias": None if state.bias is None else np.asarray(state.bias)}


@cache
def reference(model, packed, dtype, optimizer):
    return train(dict(model), packed, dtype, optimizer)


COUNTS = ("tokens", "stopped", "moe/dropped", "moe/load_max")
"""Metrics made of whole numbers: the same to the bit where routing is."""


def compare(case, dtype, optimizer, extra=None):
    overrides, packed = settings(case)
    expected = reference(tuple(sorted(on_one_device(overrides).items())), packed, dtype, optimizer)
    told, limit, exact = train({**overrides, **(extra or {})}, packed, dtype, optimizer, expected["before"]), LIMIT[dtype], dtype == "float64"
    for step, (found, wanted) in enumerate(zip(told["metrics"], expected["metrics"])):
        assert {name for name in found if name != "moe/bytes"} == {name for name in wanted if name != "moe/bytes"}
        numbers = [name for name in wanted if name != "moe/bytes" and (exact or step == 0)]
        wrong = [(name, step, found[name], wanted[name]) for name in numbers
                 if abs(found[name] - wanted[name]) > (0 if exact and name in COUNTS else limit) * max(abs(wanted[name]), 1e-3)]
        assert not wrong
        assert not exact or (told["loads"][step] == expected["loads"][step]).all(), step
    for found, wanted in zip(told["routing"], expected["routing"], strict=True):
        assert all((found[name] == wanted[name]).all() for name in ("layers", "chosen", "kept"))
    if exact and expected["bias"] is not None:
        assert (told["bias"] == expected["bias"]).all() and np.abs(told["bias"]).max() > 0
    if optimizer == "sgd":
        assert error(told["grads"], expected["grads"])[0] < limit, error(told["grads"], expected["grads"])
    assert error(told["after"], expected["after"])[0] < limit, error(told["after"], expected["after"])
    assert error(told["after"], expected["before"])[0] > 1e-3, "three steps moved nothing: the comparison would be of two initialisations"


@pytest.mark.parametrize("case", ROUTED_SMALLEST + rotating(EXPERTS[len(ROUTED_SMALLEST):], 10))
def test_float64_sgd(case):
    compare(case, "float64", "sgd")


@pytest.mark.parametrize("case", rotating(EXPERTS, 16))
def test_float64_adamw(case):
    compare(case, "float64", "adamw")


@pytest.mark.parametrize("case", rotating(EXPERTS, 16))
def test_float32_sgd(case):
    """In the unchecked mode of shard_map."""
    manual = settings(case)[0].get("parallel.lowering") != "annotated"
    compare(case, "float32", "sgd", {"parallel.check_vma": False} if manual else {})
