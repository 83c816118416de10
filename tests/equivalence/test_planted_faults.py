"""Faults that people really make, planted one at a time: the equivalence test must see each, or it proves nothing."""
import jax
import numpy as np
import pytest
from jax import lax

import jaxpara
from equivalence.hard import error, hard_batch, make_run
from equivalence.matrix import on_one_device, settings
from jaxpara import batch as batch_module
from jaxpara import collectives, gradients
from jaxpara.context import manual as context
from jaxpara.kernels import local, ring
from jaxpara.model.mlp import MLP

CASE = "gpt2 dp2 sp2 tp2 zigzag megatron m3 zdp1"


def gradients_of(case):
    overrides, packed = settings(case)
    program = jaxpara.build(make_run(overrides, "float64", "sgd"))
    loss, grads = program.loss_and_grads(program.init(), hard_batch(packed))
    return loss, grads


@pytest.fixture(scope="module")
def expected():
    overrides, packed = settings(CASE)
    program = jaxpara.build(make_run(on_one_device(overrides), "float64", "sgd"))
    return program.loss_and_grads(program.init(), hard_batch(packed))


def differs(expected, case=CASE):
    loss, grads = gradients_of(case)
    return abs(loss / expected[0] - 1) > 1e-9 or error(grads, expected[1])[0] > 1e-9


def test_no_fault_no_difference(expected):
    assert not differs(expected)


def test_replicas_not_summed(expected, monkeypatch):
    monkeypatch.setattr(gradients, "reduce_step", lambda gradient, placement, live: gradient)
    overrides = {**settings(CASE)[0], "parallel.check_vma": False, "parallel.zero.dp": 0}
    program = jaxpara.build(make_run(overrides, "float64", "sgd"))
    _, grads = program.loss_and_grads(program.init(), hard_batch())
    assert error(grads, expected[1])[0] > 1e-9


def test_norms_not_summed_over_tp_under_megatron_sp(expected, monkeypatch):
    """CASES E3: each rank's norm gradient is of its own tokens."""
    original = gradients.reduce_step

    def without_tp(gradient, placement, live):
        return original(gradient, placement, lambda axes: () if axes == ("tp",) else live(axes))

    monkeypatch.setattr(gradients, "reduce_step", without_tp)
    program = jaxpara.build(make_run({**settings(CASE)[0], "parallel.check_vma": False}, "float64", "sgd"))
    _, grads = program.loss_and_grads(program.init(), hard_batch())
    worst, path = error(grads, expected[1])
    assert worst > 1e-9 and ("norm" in path or "bias" in path or "positions" in path)


def test_sequence_shards_averaged(expected, monkeypatch):
    """CASES D17: the gradients of sequence shards add up."""
    original = gradients.reduce_step
    monkeypatch.setattr(gradients, "reduce_step", lambda gradient, placement, live: original(gradient, placement, live) / 2)
    assert differs(expected)


def test_mean_of_microbatch_means(expected, monkeypatch):
    """CASES C7: the count of the whole step divides, not each micro-batch's own."""
    original = gradients.accumulate

    def own_means(one, zeros, batch, m):
        counts = (batch["targets"] >= 0).sum((1, 2))

        def scaled(micro):
            (loss, loads), grads = one(micro)
            own = (micro["targets"] >= 0).sum()
            factor = counts.sum() / (m * jax.numpy.maximum(own, 1))
            return (loss * factor, loads), jax.tree.map(lambda leaf: leaf * factor, grads)

        return original(scaled, zeros, batch, m)

    monkeypatch.setattr(gradients, "accumulate", own_means)
    assert differs(expected)


def test_positions_by_slot(expected, monkeypatch):
    """CASES D9: under zigzag, slots are not positions."""
    original = batch_module.place_batch

    def by_slot(batch, run, mesh, fixed=True):
        order = batch_module.slots(run, run.train.seq)
        undone = {name: array[:, np.argsort(order)] if name in ("positions", "segments") else array for name, array in batch.items()}
        return original(undone, run, mesh, fixed)

    monkeypatch.setattr("jaxpara.step.place_batch", by_slot)
    assert differs(expected)


def test_ring_turned_the_other_way(expected, monkeypatch):
    original = ring.shift
    monkeypatch.setattr(ring, "shift", lambda tree, axis, pairs, scope: original(tree, axis, [(r, r) for r, _ in pairs], scope))
    assert differs(expected)


def test_gradient_of_keys_left_one_hop_from_home(expected, monkeypatch):
    original = ring.shift
    monkeypatch.setattr(ring, "shift", lambda tree, axis, pairs, scope: tree if scope == "ring.gradient" else original(tree, axis, pairs, scope))
    assert differs(expected)


def test_blocks_wrongly_skipped(expected, monkeypatch):
    monkeypatch.setattr(local, "visible", lambda query_at, key_at, window: query_at[0][:, :, None] > key_at[0][:, None, :])
    assert differs(expected)


def test_padding_in_the_loss(expected, monkeypatch):
    """CASES E7: the vocabulary of 37 is stored as 38 rows; the padded column must not enter the sum."""
    original = context.cross_entropy.loss_and_gradients
    monkeypatch.setattr(context.cross_entropy, "loss_and_gradients",
                        lambda *arguments, vocab, **rest: original(*arguments, vocab=vocab + 1, **rest))
    assert differs(expected)


def test_row_parallel_bias_added_by_every_rank(expected, monkeypatch):
    """CASES E1: the exit bias belongs after the sum."""
    original = MLP.__call__
    monkeypatch.setattr(MLP, "__call__", lambda self, x, ctx: original(self, x, ctx) + self.down_bias[...])
    monkeypatch.setattr(MLP, "bias", lambda self, x: x)
    assert differs(expected)


def test_entrance_without_its_backward_sum():
    """f without its all-reduce: invisible in the loss, and in the norm of the head."""
    case = "llama dp2 tp4 kv2 m3"
    overrides, packed = settings(case)
    single = jaxpara.build(make_run(on_one_device(overrides), "float64", "sgd"))
    expected = single.loss_and_grads(single.init(), hard_batch(packed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "copy_in", lambda x, axes, scope: x)
        program = jaxpara.build(make_run({**overrides, "parallel.check_vma": False}, "float64", "sgd"))
        loss, grads = program.loss_and_grads(program.init(), hard_batch(packed))
    assert abs(loss / expected[0] - 1) < 1e-9
    assert error(grads, expected[1])[0] > 1e-9


def test_a_common_factor_on_every_gradient_is_seen(expected, monkeypatch):
    """1/tp on everything is invisible in the loss and in clipped AdamW steps; raw gradients and SGD see it."""
    original = gradients.reduce_step
    monkeypatch.setattr(gradients, "reduce_step", lambda gradient, placement, live: original(gradient, placement, live) * 2)
    loss, grads = gradients_of(CASE)
    assert abs(loss / expected[0] - 1) < 1e-9 and error(grads, expected[1])[0] > 0.5


def test_swapped_axes_in_the_zero_scatter(expected, monkeypatch):
    """A reduction over the right number of devices, but the wrong ones."""
    original = lax.psum_scatter
    swap = {"dp": "tp", "tp": "dp"}
    monkeypatch.setattr(collectives.lax, "psum_scatter", lambda x, axes, **rest: original(x, tuple(swap.get(axis, axis) for axis in axes), **rest))
    overrides = {**settings(CASE)[0], "parallel.check_vma": False}
    program = jaxpara.build(make_run(overrides, "float64", "sgd"))
    _, grads = program.loss_and_grads(program.init(), hard_batch())
    assert error(grads, expected[1])[0] > 1e-9
