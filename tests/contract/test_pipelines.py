"""The contract of pipelines: what ticks send is what the schedule says, in the branches of the program too."""
import os
from functools import cache
from importlib import import_module

import pytest
from jax import lax

from contract.test_inspect import counted, exact, inspected
from equivalence.hard import make_run
from equivalence.matrix import PIPELINES, settings
from jaxpara import cli
from jaxpara.executors import stage
from jaxpara.hlo.lines import by_table
from jaxpara.hlo.parse import collectives
from jaxpara.pipeline.lockstep import tables
from jaxpara.pipeline.placing import schedule
from jaxpara.plan import traffic
from jaxpara.plan.passes import borders, passes, taken

PARTS = 6
ROTATION = int(os.environ.get("ROTATION", 0)) % PARTS
ONE_LAYER = ["gpt2 pp2 sp4 m4 L2 keepmatmuls", "gpt2 pp2 sp4 m4 L2 ulysses keepattention kv8 1f1b", "llama pp2 tp4 m4 L2 remat zero_r gpipe",
             "gpt2 pp4 fsdp2 m4 L4", "gpt2 pp4 fsdp2 m4 L4 zb_h2", "gpt2 pp4 sp2 m4 L4 allgather 1f1b", "gpt2 pp4 tp2 m4 L4 megatron zb_h1"]
"""Runs of one layer, of which nothing is recomputed a second time, beyond the matrix."""


def spread(cases):
    return [pytest.param(case, marks=[pytest.mark.slow] * (i % PARTS != ROTATION)) for i, case in enumerate(cases)]


@pytest.mark.parametrize("case", spread(PIPELINES + ONE_LAYER))
def test_matrix(case):
    exact(inspected(settings(case)[0]))


@cache
def report(case):
    return inspected(settings(case)[0])


TABLE = "llama pp4 tp2 m6 L4 megatron 1f1b"
SCAN = "llama pp2 tp2 m4 L4 v2 megatron circular"


@pytest.mark.parametrize("case", [TABLE, SCAN])
def test_border_bytes(case):
    """SPEC section 4: δbSH/N_tp each way, v times for v chunks; what idle ticks send is named, and is what the ticks have over."""
    found, run = report(case), report(case).run
    b, v = run.train.batch // run.train.microbatches, schedule(run).chunks
    size = 4 * b * run.train.seq * run.model.width // run.mesh.tp
    lines = [line for line in found.predicted if line.owner == "border"]
    useful = [line for line in lines if line.what == "stage borders"]
    assert sum(line.wire for line in useful) == 2 * v * run.train.microbatches * size
    idle = sum(line.calls for line in lines if "nothing" in line.what)
    assert idle == sum(border.calls - border.useful for border in borders(run)) > 0
    assert sum(line.calls for line in found.compiled if line.owner == "border") == idle + 2 * v * run.train.microbatches


def test_sends_go_out_only_in_ticks_that_have_one():
    run = report(TABLE).run
    table = schedule(run)
    for hop in tables(table).hops:
        sending = {entry.tick for entry in table.entries if entry.op.kind in "FB"
                   and 0 <= (other := entry.op.chunk + (1 if entry.op.kind == "F" else -1)) < len(table.placement)
                   and (table.placement[other] - entry.stage) % table.stages == hop.distance}
        assert int(hop.sends.sum()) == len(sending) == taken(run, "send", hop.distance) < table.ticks


def test_branches_are_counted_by_their_part():
    """Each collective in a branch runs as often as the table takes the branch, not in every tick."""
    found = report(TABLE)
    ticks, m = schedule(found.run).ticks, found.run.train.microbatches
    seen = {}
    for one in collectives(found.text):
        if one.branch:
            seen[one.branch] = by_table(one, found.run).calls * ticks // one.calls
    assert seen.keys() == {"begin", "forward", "backward", "loss", "end", "send"}
    assert {seen[part] for part in seen if part != "send"} == {m}


def test_the_cpu_ring_is_grouped_and_said_to_be(capsys):
    """A ring inside a table is all-gathers on CPU, n - 1 times the bytes; a permute on accelerators and in the circular scan."""
    overrides = {"mesh.pp": 2, "mesh.sp": 4, "model.layers": 4, "train.microbatches": 2}
    run = make_run({**overrides, "parallel.schedule": "1f1b"}, "float32")
    ring = lambda run, platform: {(line.kind, line.what): line.wire for line in traffic(run, platform) if "ring" in line.what}
    grouped, plain = ring(run, "cpu"), ring(run, "tpu")
    assert {kind for kind, _ in grouped} == {"all-gather"} and {kind for kind, _ in plain} == {"permute"}
    for (_, what), wire in plain.items():
        assert grouped["all-gather", f"{what} by groups (CPU)"] == 3 * wire
    assert {kind for kind, _ in ring(make_run(overrides, "float32"), "cpu")} == {"permute"}
    assert cli.main(["inspect", "gpt_zero_bubble", "--target", "cpu:8", "--strict"]) == 0
    out = capsys.readouterr().out
    assert "by groups" in out and "nothing to send" in out and "slots" in out and "bubble" in out


def test_gather_once_gathers_once():
    """ZeRO-3 under a pipeline: weights in every tick, or once per step, a setting."""
    case = {"mesh.pp": 2, "mesh.fsdp": 2, "model.layers": 4, "train.microbatches": 4, "parallel.schedule": "1f1b"}
    often, once = (make_run({**case, "parallel.gather_once": value}, "float32") for value in (False, True))
    calls = lambda run: {line.calls for line in traffic(run) if line.owner == "layers.mlp.up" and line.kind == "all-gather"}
    assert calls(once) == {1} and calls(often) == {passes(often).forward}
    exact(inspected({**case, "parallel.gather_once": True}))


def test_a_second_exchange_is_seen(monkeypatch):
    """Planted fault: every border is sent twice."""
    scheduled = import_module("jaxpara.executors.scheduled")
    original = scheduled.shift
    twice = lambda x, axis, pairs, scope: original(original(x, axis, pairs, scope), axis, [(b, a) for a, b in pairs], scope)
    monkeypatch.setattr(scheduled, "shift", twice)
    found = inspected(settings("llama pp2 m2 L2 1f1b")[0])
    assert not found.kept and found.unexplained_bytes > 0


def test_a_head_on_one_stage_is_seen(monkeypatch):
    """Planted fault: every stage gets all of the last outputs."""
    def everything(x, axis, split, concat, scope):
        return stage.gather(x[None], (axis,), 0, scope)[:, lax.axis_index(axis)]

    monkeypatch.setattr(stage, "exchange", everything)
    found = inspected(settings("llama pp2 m2 L2 circular")[0])
    assert not found.kept and counted(found.predicted) != counted(found.compiled)
