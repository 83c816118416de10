"""The closed forms of `jaxpara.plan` against what the traced program does: every call and every byte, per axis and kind.

The trace is of the manual lowering before XLA sees it, so what XLA is known to merge is still there twice; `test_inspect.py` compares with
compiled programs.
"""
import os
from collections import defaultdict

import pytest

import jaxpara
from contract.jaxpr_traffic import traced
from equivalence.hard import make_run
from equivalence.matrix import CASES, settings
from jaxpara.context import ManualCtx
from jaxpara.plan import traffic
from jaxpara.plan.traffic import attention_again
from jaxpara.settings import configure

MANUAL = [case for case in CASES if "annotated" not in case]


def merged(run):
    """Lines that the traced program has once more than the compiled one: the second gather of a tied embedding, and where attention's
    forward pass is run again its gathers of keys and values, or the one hop of a ring of two."""
    for line in traffic(run):
        if run.model.tied and line.owner == "embedding.tokens" and line.what == "ZeRO-3 weights, forward":
            yield line
        ring_of_two = line.what == "ring K, V, forward" and line.n == 2 and line.phase == "recompute"
        if ring_of_two or line.what == "keys and values, backward" and attention_again(run):
            yield line


def planned(run):
    """{(axes, kind): [calls, wire bytes]} without the optimizer's part, which its jit adds."""
    sums = defaultdict(lambda: [0, 0])
    for line in (*traffic(run, "tpu"), *merged(run)):      # where compilers merge nothing of layers outside loops
        if line.phase != "optimizer":
            sums[line.axes, line.kind][0] += line.calls
            sums[line.axes, line.kind][1] += line.wire
    return dict(sums)


def of(case, dtype="float32"):
    return make_run(settings(case)[0], dtype)


ROTATION = int(os.environ.get("ROTATION", 0)) % 3


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (i % 3 != ROTATION)) for i, case in enumerate(MANUAL)])
def test_matrix(case):
    run = of(case)
    assert dict(traced(jaxpara.build(run))) == planned(run)


# what runs in the branches of a pipeline's ticks is counted in compiled programs: test_pipelines.py
RECIPES = sorted(name for name in set(jaxpara.recipes()) - {"llama3_70b"} if jaxpara.recipe(name).mesh.pp == 1)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name):
    given = jaxpara.recipe(name)
    changed = {"mesh.fsdp": 8 // given.mesh.tp // given.mesh.ep} if given.mesh.auto else {}
    if given.parallel.moe_transport == "ragged":       # which CPUs have not
        changed["parallel.moe_transport"] = "gather"
    run = jaxpara.load(name, changed)
    assert dict(traced(jaxpara.build(run))) == planned(run)


def test_bfloat16_with_a_master_copy():
    """Weights and activations travel in 2 bytes, gradients and dK, dV in 4."""
    run = configure(of("llama dp2 fsdp2 sp2 zdp1 zsp1 m3"), {"precision.compute": "bfloat16", "precision.params": "bfloat16", "precision.master": "float32"})
    assert dict(traced(jaxpara.build(run))) == planned(run)
    widths = {line.what: line.width for line in traffic(run)}
    assert widths["ZeRO-3 weights, forward"] == widths["updated parameters"] == widths["ring K, V, forward"] == 2
    assert widths["ZeRO-3 gradients"] == widths["ZeRO-1 gradients"] == widths["ring dK, dV"] == 4


def test_one_device_sends_nothing():
    run = of("llama m3")
    assert traffic(run) == [] and not traced(jaxpara.build(run))


def test_an_unplanned_gather_is_seen(monkeypatch):
    """Planted fault: one all-gather too many in each block."""
    original = ManualCtx.enter

    def wasteful(self, x, owner):
        x = original(self, x, owner)
        from jax import lax
        size = x.shape[0]
        return lax.dynamic_slice_in_dim(lax.all_gather(x, "tp", axis=0, tiled=True), lax.axis_index("tp") * size, size, 0)

    run = of("llama fsdp4 tp2 m3 megatron")
    monkeypatch.setattr(ManualCtx, "enter", wasteful)
    assert dict(traced(jaxpara.build(run))) != planned(run)


def test_a_gathered_weight_kept_for_backward_is_seen(monkeypatch):
    """Planted fault: with a policy that saves everything, ZeRO-3's backward gathers vanish (and the memory they save)."""
    from jaxpara.context import base as context
    run = of("llama fsdp8 m3")
    monkeypatch.setattr(context, "save_all_but_gathers", lambda *_, **__: True)
    assert traced(jaxpara.build(run))[("fsdp",), "all-gather"][0] < planned(run)[("fsdp",), "all-gather"][0]
