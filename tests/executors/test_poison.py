"""What nobody reads may be anything: NaN in its place leaves loss and gradients bit for bit as they were (CASES G1)."""
from functools import cache
from importlib import import_module

import jax.numpy as jnp
import numpy as np
import pytest
from cases import small
from executors.mutant import bubbles_run_what_arrived, circular

import jaxpara

scheduled = import_module("jaxpara.executors.scheduled")


def answer(**overrides):
    """As `small.answer`, of a program that is built now, with whatever is planted."""
    program = jaxpara.build(small.run(**overrides))
    return program.loss_and_grads(small.start(program), small.batch())


@cache
def clean(**overrides):
    return answer(**overrides)


def assert_same_bits(got, wanted):
    assert got[0] == wanted[0] and np.isfinite(got[0])
    for path, leaf in wanted[1].items():
        assert (got[1][path] == leaf).all() and np.isfinite(leaf).all(), path


def scan(p, m, v):
    return dict(mesh__pp=p, train__microbatches=m, parallel__chunks=v, model__layers=p * v, parallel__schedule="circular")


def poisoned(out, active):
    return jnp.where(active, out, jnp.nan)


@pytest.mark.parametrize("p, m, v", [(2, 4, 1), (4, 2, 1), (2, 4, 2), (4, 2, 2)])
def test_nothing_comes_of_what_bubbles_give(p, m, v, monkeypatch):
    """More micro-batches than stages and fewer, one round and two."""
    wanted = clean(**scan(p, m, v))
    monkeypatch.setattr(circular, "hand_on", poisoned)
    assert_same_bits(answer(**scan(p, m, v)), wanted)


@pytest.mark.parametrize("v", [1, 2])
def test_a_bubble_fed_with_what_arrived_would_be_seen(v, monkeypatch):
    """Its output is not read, but 0 · NaN is the gradient of its weights: of the third stage's, which has a bubble after the second's first."""
    monkeypatch.setattr(circular, "hand_on", poisoned)
    monkeypatch.setattr(circular, "ticks", bubbles_run_what_arrived())
    loss, grads = answer(**scan(4, 2, v))
    assert np.isfinite(loss) and np.isnan(grads["layers.2.mlp.up"]).any()


TABLES = [dict(mesh__pp=2, model__layers=4, train__microbatches=4, parallel__schedule=kind) for kind in ("interleaved", "zb_v")]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table["parallel__schedule"])
def test_nothing_comes_of_idle_ticks_and_empty_slots(table, monkeypatch):
    """`empty` is what slots hold before anything arrives, and what idle ticks and W send."""
    wanted, original = clean(**table), scheduled.Machine.empty
    monkeypatch.setattr(scheduled.Machine, "empty", lambda self, count: original(self, count) * jnp.nan)
    assert_same_bits(answer(**table), wanted)


def test_a_slot_read_before_anything_arrived_would_be_seen(monkeypatch):
    original, at = scheduled.Machine.empty, scheduled.at
    monkeypatch.setattr(scheduled.Machine, "empty", lambda self, count: original(self, count) * jnp.nan)
    monkeypatch.setattr(scheduled, "at", lambda buffer, slot: at(buffer, (slot + 1) % len(buffer)))
    loss, grads = answer(**TABLES[1])
    assert np.isnan(loss) or any(np.isnan(leaf).any() for leaf in grads.values())
