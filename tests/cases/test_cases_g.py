"""CASES.md G: pipelines; and those of C and E that a pipeline could break."""
from functools import cache
from itertools import combinations

import jax.numpy as jnp
import numpy as np
import pytest
from cases import small
from cases.test_cases_c import four_and_one
from executors.mutant import bubbles_run_what_arrived, circular
from jax import lax

import jaxpara
from jaxpara.config import AXES
from jaxpara.hlo import axes_of, collectives
from jaxpara.model import norm
from jaxpara.model.gpt import GPT
from jaxpara.pipeline.formulas import bubble_fraction
from jaxpara.pipeline.placing import stack
from jaxpara.step import moment

def built(**overrides):
    """As `small.answer`, of a program that is built now, with whatever is planted."""
    program = jaxpara.build(small.run(**overrides))
    return program.loss_and_grads(small.start(program), small.batch())


FOUR = dict(model__layers=4, mesh__pp=4, train__microbatches=4)


def without_eps(x, eps):
    """x over the root of its mean square, and nothing in between: NaN for a row of zeros."""
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True))


@pytest.mark.parametrize("schedule", ["circular", "1f1b"])
def test_g1_layers_that_divide_by_their_inputs_norm_stay_finite(schedule, monkeypatch):
    """pp=4, 4 micro-batches: what a stage holds before anything has arrived is zeros, on which such a layer gives NaN."""
    monkeypatch.setattr(norm, "rms", without_eps)
    got, wanted = built(**FOUR, parallel__schedule=schedule), built(model__layers=4)
    assert all(np.isfinite(leaf).all() for leaf in got[1].values())
    small.assert_same_answer(got, wanted)


def test_g1_bubbles_on_what_arrived_would_be_seen(monkeypatch):
    monkeypatch.setattr(norm, "rms", without_eps)
    monkeypatch.setattr(circular, "ticks", bubbles_run_what_arrived())
    assert any(np.isnan(leaf).any() for leaf in built(**FOUR, parallel__schedule="circular")[1].values())


def sends(program):
    """The permutes over pp of a compiled step."""
    return [one for one in collectives(program.compiled[0].as_text()) if one.kind == "permute" and over(program, one) == ("pp",)]


def over(program, one):
    return axes_of(one.groups, one.kind, program.run.mesh.sizes)


def test_g3_a_circular_schedule_takes_19_ticks():
    """pp=4, two rounds, 8 micro-batches: 8·2 + 3 = 19 passes of the loop, forward and again backward; 24 layers: stage 0 owns 0-2 and 12-14."""
    program = small.program(model__layers=24, mesh__pp=4, train__microbatches=8, train__batch=8, parallel__chunks=2, parallel__schedule="circular")
    assert [one.trips for one in sends(program)] == [(19,), (19,)]
    assert bubble_fraction("circular", 4, 8, 2) == pytest.approx(3 / 19)
    layers = stack(program.run)
    assert layers.rows[:6] == (0, 1, 2, 12, 13, 14) and layers.rows[6:9] == (3, 4, 5)


def test_g5_one_permute_of_one_slice_per_tick_and_none_on_layer_weights():
    """pp4·dp2, circular: a stage sends its [b, S, H] in each of the 7 ticks, as many times back; of what goes over pp nothing is a layer's."""
    program = small.program(model__layers=4, mesh__pp=4, mesh__dp=2, train__microbatches=4, train__batch=8, parallel__schedule="circular")
    rows = 8 // 4 // 2
    assert [(one.trips, one.calls, one.elements) for one in sends(program)] == [((7,), 7, rows * small.SEQ * program.run.model.width)] * 2
    others = [one for one in collectives(program.compiled[0].as_text()) if "pp" in over(program, one) and one.kind != "permute"]
    assert others and not any("layers." in one.op_name and one.elements > 1 for one in others), "a layer's share of the gradient's norm is one number"
    assert {axis for one in others for axis in over(program, one)} <= set(AXES)
    summed = [one for one in others if "zero0.sum." in one.op_name]
    assert {one.op_name.split("zero0.sum.")[1].split("/")[0] for one in summed} == {"embedding.tokens", "norm.scale", "head.weight"}


WIDE = dict(precision__compute="float64", precision__params="float64")
"""For GPT-2 style, whose key biases have gradients that are 0 but for rounding."""

SIDES = dict(**WIDE, model__style="gpt2", model__kv_heads=8, model__layers=4, model__max_positions=40)


def shifted(rows=(0, 1, 2, 3)):
    """A batch of four rows, each with documents and positions of its own; rows: whose positions and documents each row gets."""
    batch = small.batch()
    offset = np.array([[0], [5], [11], [24]])
    sides = {"positions": batch["positions"] + offset, "segments": batch["segments"]}
    return {**batch, **{name: array[list(rows)] for name, array in sides.items()}}


@cache
def dense_sides():
    program = small.program(**SIDES)
    return program.loss_and_grads(small.start(program), shifted())


@pytest.mark.parametrize("schedule", ["circular", "zb_h1"])
def test_g7_each_micro_batch_has_its_own_positions_and_documents(schedule):
    """pp=2, 4 micro-batches of a row: other offsets, other documents."""
    program = small.program(**SIDES, mesh__pp=2, train__microbatches=4, parallel__schedule=schedule)
    small.assert_same_answer(program.loss_and_grads(small.start(program), shifted()), dense_sides(), 1e-9)


def test_g7_those_of_another_micro_batch_give_another_answer():
    program = small.program(**SIDES)
    loss, grads = program.loss_and_grads(small.start(program), shifted((0, 0, 0, 0)))
    assert abs(loss - dense_sides()[0]) > 1e-3 and max(small.leaf_errors(grads, dense_sides()[1]).values()) > 0.1


TIED = dict(**WIDE, model__style="gpt2", model__kv_heads=8, model__layers=4)


@pytest.mark.parametrize("schedule", ["circular", "1f1b"])
def test_g9_a_tied_embedding_gets_both_gradients(schedule):
    """pp=2: dE is what the look-up gives and what the head gives, each measured alone on one device; both matter."""
    got, dense = small.answer(**TIED, mesh__pp=2, train__microbatches=2, parallel__schedule=schedule), small.answer(**TIED)
    small.assert_same_answer(got, dense, 1e-9)
    parts = look_up_alone()["embedding.tokens"], head_alone()["embedding.tokens"]
    wanted = dense[1]["embedding.tokens"]
    assert got[1]["embedding.tokens"] == pytest.approx(parts[0] + parts[1], abs=1e-9 * float(np.abs(wanted).max()))
    assert min(np.abs(part).max() for part in parts) > 0.05 * np.abs(wanted).max()


@cache
def look_up_alone():
    with pytest.MonkeyPatch.context() as patch:
        original = GPT.output

        def output(self, x, ctx):
            x, table = original(self, x, ctx)
            return x, lax.stop_gradient(table)

        patch.setattr(GPT, "output", output)
        return built(**TIED)[1]


@cache
def head_alone():
    with pytest.MonkeyPatch.context() as patch:
        original = GPT.embed
        patch.setattr(GPT, "embed", lambda self, tokens, ctx: lax.stop_gradient(original(self, tokens, ctx)))
        return built(**TIED)[1]


def test_g11_norm_and_gradients_do_not_depend_on_pp():
    """pp = 1, 2, 4: the loss and the norm that a step reports, and each layer's gradients, which one step of plain SGD at rate 1 shows."""
    seen, gradients = [], []
    for pp in (1, 2, 4):
        program = small.program(**WIDE, model__layers=4, train__microbatches=4, mesh__pp=pp, optim__lr=1, optim__clip=None, optim__weight_decay=0,
                                **({"parallel__schedule": "1f1b"} if pp > 1 else {}))
        state, metrics = program.step(small.start(program), small.batch())
        begin, after = small.weights(program.run.model), program.params(state)
        seen.append([metrics["loss"], metrics["grad_norm"]])
        gradients.append({name: begin[name] - after[name] for name in begin})
    norm = np.sqrt(sum((leaf ** 2).sum() for leaf in gradients[0].values()))
    assert np.array(seen) == pytest.approx(np.array([[seen[0][0], norm]] * 3), rel=1e-9)
    assert max(max(small.leaf_errors(got, gradients[0]).values()) for got in gradients[1:]) < 1e-9


ACCUMULATED = dict(optim__name="momentum", optim__lr=0.1, train__batch=8, train__microbatches=4, model__layers=4)


@cache
def after_three_steps(**overrides):
    program = small.program(**ACCUMULATED, **overrides)
    state, seen = small.start(program), []
    for seed in range(3):
        state, metrics = program.step(state, small.batch(rows=8, seed=seed))
        seen.append([metrics["loss"], metrics["grad_norm"]])
    return program.params(state), np.array(seen)


def test_c5_stages_of_zero_agree_in_a_pipeline():
    """pp2·dp2, 4 micro-batches, 3 steps, ZeRO 0 to 3 over dp and over pp: they agree with one another and with one device."""
    piped = dict(mesh__pp=2, mesh__dp=2, parallel__schedule="1f1b")
    results = [after_three_steps(**piped, **({"parallel__zero__dp": stage, "parallel__zero__pp": stage} if stage else {})) for stage in range(4)]
    for (values, seen), (wanted, wanted_seen) in combinations([*results, after_three_steps()], 2):
        assert seen == pytest.approx(wanted_seen, rel=1e-5)
        assert max(small.leaf_errors(values, wanted).values()) < 1e-5
    begin = small.weights(small.run(**ACCUMULATED).model)
    assert min(np.abs(results[0][0][name] - begin[name]).max() for name in begin) > 1e-5, "every parameter moved"


def test_c7_the_loss_of_a_pipeline_is_the_mean_over_tokens():
    """Micro-batches with four tokens of loss 1 and one of loss 3: 1.4 in a pipeline too."""
    piped, whole = four_and_one(2, mesh__pp=2, parallel__schedule="gpipe"), four_and_one(1)
    assert piped[0] == pytest.approx(1.4, rel=1e-6)
    small.assert_same_answer(piped, whole)


def test_e3_norm_gradients_in_a_pipeline_are_alike_on_all_ranks_and_whole():
    """pp2·tp4 with the sequence split between blocks: each rank's norms saw a quarter of the tokens, each stage's final norm half of what left."""
    piped = dict(mesh__pp=2, mesh__tp=4, parallel__tp_sequence=True, train__microbatches=2, parallel__schedule="1f1b", model__layers=4)
    program = small.program(**piped)
    placed, state = program.put(small.batch()), small.start(program)
    grads = program._loss_and_grads(state.params, placed, moment(state))[2]
    for name in ("layers.norm1.scale", "norm.scale"):
        copies = small.pieces(grads[name])
        alike = [copies] if name == "norm.scale" else [copies[:4], copies[4:]]
        assert len(copies) == 8 and all((copy == group[0]).all() for group in alike for copy in group)
    small.assert_same_answer(small.answer(**piped), small.answer(model__layers=4))
