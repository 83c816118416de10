"""CASES.md C: optimizer state, ZeRO, accumulation, norms, precision."""
import re
from functools import lru_cache

import jax
import numpy as np
import pytest
from cases import small
from jax.extend import core

import jaxpara
from jaxpara import ConfigError
from jaxpara.mesh import partition
from jaxpara.params import count
from jaxpara.step import moment

EIGHT = dict(model__width=8, model__vocab=8, model__ffn=24, model__layers=3, mesh__dp=8, train__batch=8, optim__name="adamw")
"""Every dim but the layers splits eight ways; the token table is [8, 8]."""


@lru_cache(maxsize=None)
def after_one_step(**overrides):
    """(program, state) after one step."""
    program = small.program(**overrides)
    return program, program.step(small.start(program), small.batch(rows=program.run.train.batch, vocab=program.run.model.vocab))[0]


def moments(state):
    adam = next(part for part in jax.tree.leaves(state.optimizer, is_leaf=lambda node: hasattr(node, "mu")) if hasattr(part, "mu"))
    return adam.mu, adam.nu, adam.count


@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
def test_c1_moments_lie_on_all_devices(stepped):
    """ZeRO-1 over 8 devices, Adam, a float32 table [8, 8]: 32 bytes of each moment on each device, 256 in all; the count everywhere."""
    program, state = after_one_step(**EIGHT, parallel__zero__dp=1)
    state = state if stepped else small.start(program)
    mu, nu, counted = moments(state)
    for one in (mu["embedding.tokens"], nu["embedding.tokens"]):
        assert one.shape == (8, 8) and one.dtype == np.float32
        assert [shard.data.nbytes for shard in one.addressable_shards] == [32] * 8
        assert len({str(shard.index) for shard in one.addressable_shards}) == 8, "eight pieces, not eight copies of one"
    assert counted.sharding.is_fully_replicated and len(counted.addressable_shards) == 8


def test_c3_a_stage_that_cannot_apply_is_an_error():
    with pytest.raises(ConfigError, match=r"parallel.zero.dp = 1 cannot take effect: mesh.dp = 1"):
        small.run(parallel__zero__dp=1)


def test_c3_a_recipes_stage_that_cannot_apply_is_a_note():
    run = jaxpara.load("gpt_zero1", {"mesh.dp": 1})
    assert any("parallel.zero.dp = 1 is idle" in note for note in run.notes)


def test_c3_stage_1_keeps_an_eighth_of_the_moments_and_gathers_parameters_once():
    """Bytes of both moments per device: exactly an eighth of the whole. The compiled step gathers every parameter element once, outside loops."""
    program, state = after_one_step(**EIGHT, parallel__zero__dp=1)
    parameters = count(program.run.model)
    mu, nu, _ = moments(state)
    assert small.total_bytes((mu, nu)) == 2 * 4 * parameters // 8
    gathered = {"loops": 0, "main": 0}
    for computation in re.split(r"\n(?=\S)", small.text(program)):
        for result in re.findall(r"= (.*?) all-gather(?:-start)?\(", computation):
            shapes = [int(np.prod([int(n) for n in dims.split(",") if n])) for dims in re.findall(r"f32\[([\d,]*)\]", result)]
            gathered["main" if computation.startswith("ENTRY") else "loops"] += sum(shapes)
    assert gathered == {"loops": 0, "main": parameters}


def test_c3_without_a_stage_every_device_has_all_moments():
    program = small.program(**EIGHT)
    mu, nu, _ = moments(small.start(program))
    assert small.total_bytes((mu, nu)) == 2 * 4 * count(program.run.model)


ACCUMULATED = dict(train__batch=32, train__seq=6, optim__name="momentum", optim__weight_decay=0.1)


@lru_cache(maxsize=None)
def after_three_steps(**overrides):
    program = small.program(**ACCUMULATED, **overrides)
    state, norms = small.start(program), []
    for seed in range(3):
        state, metrics = program.step(state, small.batch(rows=32, seq=6, seed=seed))
        norms.append([metrics["loss"], metrics["grad_norm"]])
    return program.params(state), np.array(norms)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_c5_stages_agree_under_accumulation(stage):
    """dp=8, 4 micro-batches, 3 steps of clipped momentum SGD: parameters, losses and gradient norms are those of one device and one batch."""
    overrides = {"parallel__zero__dp": stage} if stage else {}
    values, norms = after_three_steps(mesh__dp=8, train__microbatches=4, **overrides)
    wanted, wanted_norms = after_three_steps()
    assert norms == pytest.approx(wanted_norms, rel=1e-5)
    assert max(small.leaf_errors(values, wanted).values()) < 1e-5
    begin = small.weights(small.run(**ACCUMULATED).model)
    assert min(np.abs(wanted[name] - begin[name]).max() for name in wanted) > 1e-5, "every parameter moved"


def constant_model(**overrides):
    """A program and weights for which every token has the same distribution: token 0 has loss 1, token 1 loss 3."""
    program = small.program(model__style="gpt2", model__tied=False, model__kv_heads=8, model__vocab=5, train__seq=6, **overrides)
    values = small.zeros(program.run.model)
    values["norm.bias"][0] = 1
    values["head.weight"][:, 0] = np.log([np.exp(-1), np.exp(-3)] + [(1 - np.exp(-1) - np.exp(-3)) / 3] * 3)
    return program, values


def four_and_one(m, **overrides):
    """(loss, gradients) of 4 rows of which rows 0, 1 have four targets of loss 1 and rows 2, 3 one of loss 3."""
    program, values = constant_model(train__microbatches=m, **overrides)
    tokens, targets = np.ones((4, 6), int), np.full((4, 6), -1)
    targets[0, 1:4], targets[1, 2], targets[3, 5] = 0, 0, 1
    return program.loss_and_grads(program.init(values), {"tokens": tokens, "targets": targets})


def test_c7_the_loss_is_the_mean_over_tokens_not_over_micro_batches():
    """Micro-batches with four tokens of loss 1 and one of loss 3: 7/5 = 1.4, where the mean of means is 2. Over dp=2, whose
    devices count different tokens too. Gradients as in one batch on one device."""
    accumulated, whole = four_and_one(2, mesh__dp=2), four_and_one(1)
    assert accumulated[0] == pytest.approx(1.4, rel=1e-6) and whole[0] == pytest.approx(1.4, rel=1e-6)
    assert np.abs(whole[1]["norm.bias"]).max() > 0.05
    small.assert_same_answer(accumulated, whole)


def test_c9_the_logged_loss_is_the_one_that_is_differentiated():
    """tp2·sp2: the step's loss and norm, those of `loss_and_grads`, and one device's are the same."""
    program = small.program(mesh__tp=2, mesh__sp=2)
    loss, grads = small.answer(mesh__tp=2, mesh__sp=2)
    _, metrics = program.step(small.start(program), small.batch())
    small.assert_same_answer((loss, grads), small.answer())
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics["grad_norm"] == pytest.approx(np.sqrt(sum((g.astype(float) ** 2).sum() for g in grads.values())), rel=1e-5)
    assert metrics["tokens"] == (small.batch()["targets"] >= 0).sum()


def accumulation(program):
    """Types of what the loop over micro-batches hands on: the results of its body, which collects nothing."""
    state, batch = program.abstract()
    jaxpr, m = jax.make_jaxpr(program._gradients)(state.params, batch, moment(state)), program.run.train.microbatches

    def find(jaxpr):
        for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            if equation.primitive.name == "scan" and equation.params["length"] == m:
                yield [variable.aval for variable in equation.outvars]
            for value in equation.params.values():
                if isinstance(value, (core.Jaxpr, core.ClosedJaxpr)):
                    yield from find(value)
    return next(find(jaxpr))


@pytest.mark.parametrize("precision", [{}, {"precision__params": "bfloat16", "precision__compute": "bfloat16"}, {
    "precision__params": "bfloat16", "precision__compute": "bfloat16", "precision__master": "float32"}], ids=["float32", "bfloat16", "master"])
def test_c11_accumulation_is_in_float32_and_holds_one_gradient_tree(precision):
    """Four micro-batches: the loop carries the loss and one float32 number per parameter, whatever the parameters' dtype, and nothing else."""
    program = small.program(train__microbatches=4, **precision)
    carried = accumulation(program)
    assert {aval.dtype.name for aval in carried} == {"float32"}
    assert sum(aval.size for aval in carried) == count(program.run.model) + 1


def test_c11_four_accumulated_micro_batches_update_as_one_batch_does():
    """float32, one device, three steps: the update of k = 4 equals that of one batch."""
    values, _ = after_three_steps(train__microbatches=4)
    wanted, _ = after_three_steps()
    assert max(small.leaf_errors(values, wanted).values()) < 1e-5


def updates(program, grads, times=1):
    """The state and last metrics after `times` updates with these gradients, starting from the initial values."""
    @jax.jit
    def one(state, grads):
        return program._update(state, np.float32(1), np.int32(1), grads)
    state = program.init(small.weights(program.run.model, spread=0))
    for _ in range(times):
        state, metrics = one(state, grads)
    return state, metrics


def no_grads(program, dtype):
    return {name: np.zeros(placement.shape, dtype) for name, placement in program.placements.items()}


def test_c15_the_norm_of_float16_gradients_neither_overflows_nor_vanishes():
    """100,000 gradients of 0.01 and three of 300 in float16: the norm is 519.62, squares of 300 alone being past float16. The norm that is
    logged is the one that clips: what is applied is gradient / norm."""
    program = small.program(model__width=400, model__vocab=250, model__layers=1, precision__params="float16", precision__loss_scale=1,
                            optim__lr=1, optim__weight_decay=0, optim__clip=1)
    grads = no_grads(program, np.float16)
    grads["embedding.tokens"][:] = 0.01
    grads["norm.scale"][:3] = 300
    state, metrics = updates(program, grads)
    norm = metrics["grad_norm"]
    assert float(norm) == pytest.approx(519.62, abs=0.01) and int(state.stopped) == -1
    applied = 1 - np.asarray(state.params["norm.scale"], np.float32)
    assert applied[:3] == pytest.approx(300 / float(norm), rel=1e-3) and (applied[3:] == 0).all()
    small_ones = -np.asarray(state.params["embedding.tokens"], np.float32)
    assert (small_ones > 0).all() and small_ones == pytest.approx(0.01 / float(norm), rel=1e-2)


def test_c15_a_loss_scale_is_undone_where_small_gradients_survive_it():
    """float16 parameters without a master, gradients of 1e-7 that float16 holds with two bits: scaled by 4096 they are reduced whole, and
    they must be divided in float32, not back in float16."""
    grads = []
    for precision in ({}, dict(precision__params="float16", precision__compute="float16", precision__loss_scale=4096)):
        program = small.program(**precision)
        values = small.weights(program.run.model)
        values["norm.scale"] *= 2e-5
        grads.append(program.loss_and_grads(program.init(values), small.batch())[1])
    wide, narrow = (leaves["layers.2.attention.key"] for leaves in grads)
    assert 1e-8 < np.median(np.abs(wide)) < 1e-6
    assert (narrow == 0).mean() < 0.01 and np.abs(narrow - wide).max() < 0.02 * np.abs(wide).max()


def test_c17_a_float32_master_keeps_updates_that_bfloat16_swallows():
    """100 updates of -6e-4 to a weight of 1: 0.94 with a float32 master, of which the weight is the rounding; 1 exactly without, which is said."""
    plain = dict(precision__params="bfloat16", precision__compute="bfloat16", optim__lr=6e-4, optim__weight_decay=0, optim__clip=None)
    kept, lost = small.program(**plain, precision__master="float32"), small.program(**plain)
    for program, dtype in ((kept, np.float32), (lost, jax.numpy.bfloat16)):
        grads = no_grads(program, dtype)
        grads["norm.scale"][:] = 1
        state, _ = updates(program, grads, 100)
        stored = np.asarray(state.params["norm.scale"], np.float32)
        if program is kept:
            assert program.params(state)["norm.scale"] == pytest.approx(0.94, abs=1e-5)
            assert (stored == np.float32(jax.numpy.bfloat16(0.94))).all()
        else:
            assert (stored == 1).all()
    said = "bfloat16 without precision.master"
    assert any(said in note for note in lost.run.notes) and not any(said in note for note in kept.run.notes)


@pytest.mark.parametrize("overrides", [{"mesh__tp": 2, "mesh__sp": 2}, {"mesh__fsdp": 4, "mesh__tp": 2, "parallel__tp_sequence": True,
                                                                     "parallel__lowering": "annotated", "optim__name": "adamw"}],
                         ids=["manual", "annotated"])
def test_c25_four_steps_compile_once(overrides):
    """From a fresh state: one entry in the step's cache. One started from given arrays, as a restored one is, adds none."""
    program = small.program(**overrides)
    states = [small.start(program)] if program.run.parallel.lowering == "annotated" else [program.init(), small.start(program)]
    for state in states:
        for seed in range(4):
            state, metrics = program.step(state, small.batch(seed=seed))
    assert program._step._cache_size() == 1 and np.isfinite(metrics["loss"])


def test_c13_the_norm_counts_every_expert_once_and_dense_parameters_once():
    """dp=2, ep=2, tp=2, in the optimizer's own shards: four experts with four ones each, of both halves of their width, and four ones of a dense
    parameter: sqrt(20)."""
    program = small.program(mesh__dp=2, mesh__ep=2, mesh__tp=2, parallel__zero__dp=1, model__moe__experts=4, model__moe__ffn=12)
    grads = no_grads(program, np.float32)
    grads["layers.moe.up"][1, :, 5, ::3] = 1
    grads["norm.scale"][:4] = 1
    shardings = {name: jax.NamedSharding(program.mesh, partition(placement.optimizer)) for name, placement in program.placements.items()}
    placed = jax.device_put(grads, shardings)
    assert len({str(shard.index) for shard in placed["layers.moe.up"].addressable_shards}) == 8
    _, metrics = updates(program, placed)
    assert float(metrics["grad_norm"]) == pytest.approx(np.sqrt(20), rel=1e-6)
