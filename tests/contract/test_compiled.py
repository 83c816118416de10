"""The compiled program: where its collectives stand, what it keeps, that it compiles once and gives its buffers back."""
import re
from functools import cache
from math import prod

import jax
import numpy as np
import pytest

import jaxpara
from equivalence.hard import hard_batch, make_run
from jaxpara.config import AXES
from jaxpara.hlo import collectives
from jaxpara.plan import model_state


@cache
def compiled(**overrides):
    run = make_run({name.replace("__", "."): value for name, value in overrides.items()}, "float32")
    return jaxpara.build(run).lower().compile()


def kinds(found, inside):
    """Kinds of the collectives inside or outside loops; the scalars of losses and norms left out."""
    return {one.kind for one in found if bool(one.loops) == inside and one.elements > 8}


@pytest.mark.parametrize("stage", range(4))
def test_zero_communicates_where_the_table_says(stage):
    """Stages 0 and 1 never inside a loop; 2 scatters in the accumulation loop and gathers once; 3 gathers and scatters in the layer loop."""
    found = collectives(compiled(mesh__dp=8, parallel__zero__dp=stage, train__microbatches=3, model__vocab=40).as_text())
    inside, outside = kinds(found, True), kinds(found, False)
    assert inside == {0: set(), 1: set(), 2: {"reduce-scatter"}, 3: {"all-gather", "reduce-scatter"}}[stage]
    assert outside == {0: {"all-reduce"}, 1: {"reduce-scatter", "all-gather"}, 2: {"all-gather"}, 3: set()}[stage]


def test_one_device_has_no_collective_and_dead_axes_have_no_traffic():
    """CASES R8: axes of size 1 leave nothing behind, not even groups of one."""
    assert collectives(compiled().as_text()) == []
    found = collectives(compiled(mesh__dp=2, mesh__tp=2).as_text())
    assert found and all(len(group) == 2 for one in found for group in one.groups)


def test_full_logits_are_never_held():
    """Chunks of 7 tokens: nothing of (tokens on a device) × V exists. The check sees it when the chunk is the whole."""
    tokens, vocab = 24 * 32 // 2, 37
    shapes = lambda chunk: {prod(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", compiled(mesh__dp=2, parallel__loss_chunk=chunk).as_text())}
    assert tokens * vocab in shapes(1024)
    assert tokens * vocab not in shapes(7)


@pytest.mark.parametrize("remat", ["none", "full", "selective"])
def test_gathered_weights_are_not_kept(remat):
    """Under ZeRO-3 no buffer has the size of all layers of a whole weight; under ZeRO-0 there is one."""
    stacked = r"f32\[3,48,80\]"
    assert not re.search(stacked, compiled(mesh__fsdp=8, parallel__remat=remat).as_text())
    assert re.search(stacked, compiled(mesh__dp=8).as_text())


def test_argument_bytes_are_the_planned_model_state():
    """Parameters and optimizer state on one device, exactly; and all of them are donated."""
    for overrides in ({"mesh__fsdp": 8}, {"mesh__dp": 8, "parallel__zero__dp": 1}, {"mesh__fsdp": 2, "mesh__sp": 2, "mesh__tp": 2}):
        run = make_run({name.replace("__", "."): value for name, value in overrides.items()}, "float32")
        memory, state = compiled(**overrides).memory_analysis(), model_state(run)
        rows = run.train.batch // run.mesh.batch
        batch = 4 * rows * (2 * run.train.seq // run.mesh.sp + 2 * run.train.seq)    # row numbers serve dropout only: pruned
        scalars = 4 * 4          # step, stopped, Adam's count, the schedule's count
        held = state["parameters"] + state["optimizer"] + scalars
        assert memory.argument_size_in_bytes == held + batch
        assert memory.alias_size_in_bytes == held


def test_four_steps_compile_once_and_donate():
    """CASES C25. pytest turns the warning about donated buffers that were not used into an error."""
    program = jaxpara.build(make_run({"mesh.fsdp": 2, "mesh.sp": 2, "mesh.tp": 2, "parallel.tp_sequence": True}, "float32"))
    state, batch = program.init(), hard_batch()
    first = state
    for _ in range(4):
        state, metrics = program.step(state, batch)
    assert program._step._cache_size() == 1
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first.params))


def test_initial_values_are_the_same_bits_on_every_mesh():
    """CASES A6, for both styles, with padding, copied KV heads and every ZeRO stage."""
    for style in ("gpt2", "llama"):
        base = {"model.style": style, "model.kv_heads": 2}
        single = jaxpara.build(make_run(base, "float32"))
        expected = single.params(single.init())
        for mesh in ({"mesh.dp": 8, "parallel.zero.dp": 3}, {"mesh.tp": 8}, {"mesh.fsdp": 2, "mesh.tp": 4}, {"mesh.sp": 2, "mesh.dp": 4, "parallel.zero.sp": 3},
                     {"mesh.tp": 2, "mesh.fsdp": 4, "parallel.lowering": "annotated"}):
            program = jaxpara.build(make_run({**base, **mesh}, "float32"))
            params = program.params(program.init())
            assert params.keys() == expected.keys()
            assert all(np.array_equal(params[path], leaf) for path, leaf in expected.items()), mesh
        assert any(leaf.std() > 0.01 for leaf in expected.values())


def test_the_mesh_has_all_six_axes():
    assert jaxpara.build(make_run({"mesh.tp": 2})).mesh.axis_names == AXES
