"""Faults that pipelines really have, planted one at a time: the comparison with one device must see each."""
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from importlib import import_module
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from jax import lax

import jaxpara
from equivalence.hard import awake, error, hard_batch, make_run
from equivalence.matrix import on_one_device, settings
from equivalence.test_matrix import rotating
from jaxpara import gradients, zero
from jaxpara.collectives import exchange
from jaxpara.executors.stage import Stage
from jaxpara.pipeline import lockstep

circular, scheduled, stage = (import_module(f"jaxpara.executors.{name}") for name in ("circular", "scheduled", "stage"))

SCAN, TABLE, SPLIT = "gpt2 pp2 m3 circular", "gpt2 pp2 m3 1f1b", "gpt2 pp2 m3 zb_h2"
BOTH = pytest.mark.parametrize("case", rotating([SCAN, TABLE], 2))
"""One executor a day."""


@cache
def expected(model):
    program = jaxpara.build(make_run(dict(model), "float64", "sgd"))
    start = awake(program.params(program.init()))
    return (*program.loss_and_grads(program.init(start), hard_batch()), start)


def trained(case):
    """((loss, gradients), those of one device) of a pipeline, in the unchecked mode, where no type stands in a fault's way."""
    overrides, _ = settings(case)
    loss, grads, start = expected(tuple(sorted(on_one_device(overrides).items())))
    program = jaxpara.build(make_run({**overrides, "parallel.check_vma": False}, "float64", "sgd"))
    return program.loss_and_grads(program.init(start), hard_batch()), (loss, grads)


def differences(case):
    """{path or "loss": relative error} of what a pipeline gives and one device does not."""
    (loss, grads), (right, wanted) = trained(case)
    largest = max(abs(leaf).max() for leaf in wanted.values())
    found = {path: abs(grads[path] - leaf).max() / max(abs(leaf).max(), 1e-3 * largest) for path, leaf in wanted.items()}
    return {path: value for path, value in {"loss": abs(loss / right - 1), **found}.items() if not value <= 1e-9}


@pytest.mark.parametrize("case", [SCAN, TABLE, SPLIT])
def test_no_fault_no_difference(case):
    got, wanted = trained(case)
    assert not differences(case) and error(got[1], wanted[1])[0] < 1e-9


@BOTH
def test_outer_gradients_not_summed_over_stages(case, monkeypatch):
    """The head's are of one part of the tokens, the embedding's of the first stage; the layers' need no sum."""
    original = gradients.reduce_step

    def own(gradient, placement, live):
        stages = {axis: kind for axis, kind in placement.stages.items() if axis != "pp"}
        return original(gradient, replace(placement, stages=stages), live)

    monkeypatch.setattr(gradients, "reduce_step", own)
    found = differences(case)
    assert {"embedding.tokens", "norm.scale"} <= set(found) and not any(path.startswith("layers") or path == "loss" for path in found)


@BOTH
def test_targets_of_another_stages_tokens(case, monkeypatch):
    """Each stage takes the targets of the part that the next one has."""
    original = Stage.part_of_targets
    monkeypatch.setattr(Stage, "part_of_targets", lambda self, targets: lax.ppermute(original(self, targets), "pp", [(0, 1), (1, 0)]))
    assert "loss" in differences(case)


@BOTH
def test_every_stage_dealt_the_same_part(case, monkeypatch):
    """The first part's tokens counted by all, with each its own targets."""
    monkeypatch.setattr(stage, "deal", lambda x, source: lax.all_gather(exchange(x, "pp", 0, 0, "border.deal")[source], "pp")[0][None])
    assert "loss" in differences(case)


@BOTH
def test_only_the_first_part_in_the_loss(case, monkeypatch):
    """One stage's share, as if the loss were not dealt out: the others count nothing."""
    original = Stage.part_of_targets
    monkeypatch.setattr(Stage, "part_of_targets", lambda self, targets: jnp.where(self.rank == 0, original(self, targets), -1))
    assert "loss" in differences(case)


@pytest.mark.parametrize("kind", rotating(["circular v2", "interleaved", "zb_v"], 3))
def test_layers_in_the_order_of_the_stages(kind, monkeypatch):
    """Two chunks per stage: layers stored 0, 1, 2, 3 in place of 0, 2, 1, 3 (in a V: 0, 3, 1, 2), so that chunks run in another order."""
    original = zero.stack
    monkeypatch.setattr(zero, "stack", lambda run: replace(original(run), rows=tuple(range(run.model.layers))))
    assert "loss" in differences(f"gpt2 pp2 m4 L4 {kind}")


@BOTH
def test_rows_of_another_micro_batch(case, monkeypatch):
    """CASES G7: positions and documents of the next micro-batch."""
    original = Stage.rows
    monkeypatch.setattr(Stage, "rows", lambda self, batch, index, *rest: original(self, batch, (index + 1) % 3, *rest))
    assert "loss" in differences(case)


def test_weight_gradients_of_another_pair(monkeypatch):
    """W reads the slot after its own: the loss, the norms' gradients and everything else that B makes are right."""
    def mixed(schedule):
        table = lockstep.tables(schedule)
        assert table.pairs > 1
        return replace(table, pair=jnp.where(table.op == lockstep.W, (table.pair + 1) % table.pairs, table.pair))

    monkeypatch.setattr(scheduled, "tables", mixed)
    found = differences(SPLIT)
    assert "layers.0.mlp.up" in found and not any("norm" in path or "bias" in path or path == "loss" for path in found)


@pytest.mark.parametrize("case, crowded", [("gpt2 pp2 m3 1f1b", "input"), ("gpt2 pp2 m4 interleaved L4", "gradient"), ("gpt2 pp2 m3 zb_h2", "pair")])
def test_one_slot_too_few(case, crowded, monkeypatch):
    """Chunk inputs, output gradients, or pairs for W: what is kept shares a slot with what is still in use."""
    original = lockstep.assign

    def tables(schedule):
        asked = iter(("input", "gradient", "pair"))

        def assign(schedule, kept):
            found = original(schedule, kept)
            fewer = max(found.values()) if next(asked) == crowded else len(found)
            assert fewer > 0
            return {key: slot % fewer for key, slot in found.items()}

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lockstep, "assign", assign)
            table = lockstep.tables.__wrapped__(schedule)
        assert next(asked, "pair") == "pair", "the slots are assigned in this order"
        return table

    monkeypatch.setattr(scheduled, "tables", tables)
    assert differences(case)


def test_tied_embedding_without_the_inputs_gradient(monkeypatch):
    """CASES G9, under a table: nothing at the end of a micro-batch's backward pass."""
    monkeypatch.setattr(scheduled.Machine, "end", lambda self, now, message, gradients: gradients)
    assert set(differences(TABLE)) == {"embedding.tokens", "embedding.positions"}


@BOTH
def test_tied_embedding_without_the_heads_gradient(case, monkeypatch):
    """CASES G9."""
    original = Stage.loss
    kept = lambda sinks: {**sinks, "embedding.tokens": lax.stop_gradient(sinks["embedding.tokens"])}
    monkeypatch.setattr(Stage, "loss", lambda self, x, targets, weights, sinks: original(self, x, targets, weights, kept(sinks)))
    assert set(differences(case)) == {"embedding.tokens"}


def test_bubbles_output_counted(monkeypatch):
    """The last stage's outputs taken one tick too early: the first is a bubble's."""
    original = circular.schedule
    early = lambda table: SimpleNamespace(placement=table.placement, forward_ticks=table.forward_ticks - 1)
    monkeypatch.setattr(circular, "schedule", lambda run: early(original(run)))
    assert "loss" in differences(SCAN)


def test_first_stage_takes_what_arrived(monkeypatch):
    """Two rounds, more micro-batches than stages: without the wait the second round begins with another micro-batch's activations."""
    monkeypatch.setattr(circular.lax, "dynamic_update_index_in_dim", lambda buffer, value, index, axis: buffer)
    assert "loss" in differences("gpt2 pp2 m3 L4 v2 circular")


PERMUTES = """
import conftest
from jaxpara.context import manual as context
from equivalence import test_planted_pipeline_faults as faults
context.rotate = None
print("WRONG" if faults.differences("llama pp2 sp2 m3 1f1b") else "RIGHT")
"""


@pytest.mark.slow
def test_ring_of_permutes_among_stages_that_do_different_things():
    """XLA:CPU waits for all devices of the mesh at a permute, also in a branch that only some take: the program hangs (XLA ends it) or mixes up
    partners, and must not seem to work."""
    timeouts = "--xla_cpu_collective_call_warn_stuck_timeout_seconds=5 --xla_cpu_collective_call_terminate_timeout_seconds=10"
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {timeouts}", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", PERMUTES], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert "rendezvous" in run.stderr if run.returncode else run.stdout.strip() == "WRONG", run.stderr[-2000:]
