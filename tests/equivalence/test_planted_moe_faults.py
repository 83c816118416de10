"""Faults that people really make in mixtures of experts, planted one at a time: the equivalence test must see each, or it proves nothing."""
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

import jaxpara
from equivalence.hard import awake, error, hard_batch, make_run
from equivalence.matrix import on_one_device, settings
from jaxpara import gradients, transport, zero
from jaxpara.balance import balanced
from jaxpara.context import ManualCtx
from jaxpara.state import to_single_device
from jaxpara.step import moment

CASE = "llama moe ep2 sp2 tp2 zigzag cap1 grp16 aux noise bias"


def told(overrides, start=None):
    """(loss, gradients, the routers' bias after the step, parameters before) of the first step."""
    program = jaxpara.build(make_run(overrides, "float64", "sgd"))
    start = awake(program.params(program.init())) if start is None else start
    state = program.init(start)
    loss, _, grads, loads = program._loss_and_grads(state.params, program.put(hard_batch()), moment(state))
    return float(loss), to_single_device(grads, program.placements), np.asarray(balanced(program.run, state.bias, loads.counts, True)), start


@cache
def expected():
    return told(on_one_device(settings(CASE)[0]))


def differences(**extra):
    """(of the loss, of the gradients, paths of those that differ, of the bias) between the case, as it is now, and one device."""
    loss, grads, bias, _ = told({**settings(CASE)[0], **extra}, expected()[3])
    wanted = expected()
    wrong = {path for path in grads if error({**wanted[1], path: grads[path]}, wanted[1])[0] > 1e-9}
    return abs(loss / wanted[0] - 1), error(grads, wanted[1])[0], wrong, np.abs(bias - wanted[2]).max()


UNCHECKED = {"parallel.check_vma": False}


def test_no_fault_no_difference():
    loss, grads, wrong, bias = differences()
    assert loss < 1e-9 and grads < 1e-9 and not wrong and bias == 0 and np.abs(expected()[2]).max() > 0


def test_expert_gradients_averaged_over_ep(monkeypatch):
    """CASES F1: every expert has seen the tokens of all devices of ep, once."""
    original = gradients.reduce_step
    averaged = lambda gradient, placement, live: original(gradient, placement, live) / (2 if "experts" in placement.parameter.labels else 1)
    monkeypatch.setattr(gradients, "reduce_step", averaged)
    loss, _, wrong, _ = differences()
    assert loss < 1e-9 and wrong == {f"layers.{i}.moe.{name}" for i in range(3) for name in ("gate", "up", "down")}


def test_router_gradient_not_summed_over_tp(monkeypatch):
    """The weights of the experts are gradients of partial sums: each tp rank has those of its own columns."""
    original = zero.tp_partial
    monkeypatch.setattr(zero, "tp_partial", lambda parameter, run: parameter.name != "layers.moe.router" and original(parameter, run))
    loss, _, wrong, _ = differences(**UNCHECKED)
    assert loss < 1e-9 and wrong == {f"layers.{i}.moe.router" for i in range(3)}


def test_auxiliary_gradient_counted_by_each_tp_rank(monkeypatch):
    monkeypatch.setattr(ManualCtx, "share", lambda self, weigh, layer: jnp.where(layer >= 0, weigh, 0))
    loss, grads, _, _ = differences()
    assert loss < 1e-9 and grads > 1e-9


def test_loads_of_a_part_of_the_row(monkeypatch):
    """CASES F3: f of the load-balance loss is of the whole row, wherever it lies."""
    monkeypatch.setattr(ManualCtx, "sum_of_row", lambda self, counts: counts)
    loss, grads, _, _ = differences()
    assert loss > 1e-9 and grads > 1e-9


def test_drops_decided_by_the_tokens_at_hand(monkeypatch):
    monkeypatch.setattr(ManualCtx, "spans", lambda self: False)
    loss, grads, _, _ = differences()
    assert loss > 1e-9 and grads > 1e-9


def test_noise_drawn_by_the_devices_own_row_numbers(monkeypatch):
    original = ManualCtx.draw

    def by_own_row(self, *what):
        return original(self.bind(self.rows._replace(number=self.rows.number % 12)), *what)

    monkeypatch.setattr(ManualCtx, "draw", by_own_row)
    loss, grads, _, _ = differences()
    assert loss > 1e-9 and grads > 1e-9


def test_gates_without_a_gradient(monkeypatch):
    """The router then learns from its auxiliary loss alone."""
    original = transport.combine
    monkeypatch.setattr(transport, "combine", lambda rows, gates, plan: original(rows, jax.lax.stop_gradient(gates), plan))
    loss, grads, _, _ = differences()
    assert loss < 1e-9 and grads > 1e-9


def test_cells_sent_back_to_the_wrong_device(monkeypatch):
    original = transport.exchange

    def turned(x, axis, split, concat, scope, groups=None):
        there = original(x, axis, split, concat, scope, groups)
        return jnp.roll(there, there.shape[0] // 2, 0) if scope == transport.BACK else there

    monkeypatch.setattr(transport, "exchange", turned)
    loss, grads, _, _ = differences()
    assert loss > 1e-9 and grads > 1e-9


def test_bias_from_the_loads_of_one_device(monkeypatch):
    """Each device would move its own bias; here the first one's is shown."""
    monkeypatch.setattr(gradients, "sum_loads", lambda loads, run: loads)
    _, _, _, bias = differences(**UNCHECKED)
    assert bias > 0
