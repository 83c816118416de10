"""Every shipped schedule is legal for every p, m, v it accepts, and refuses the rest in words; the checker finds planted faults."""
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from jaxpara.errors import ConfigError
from jaxpara.pipeline import KINDS, Entry, Op, build, checked, first_fault, wrong
from jaxpara.pipeline.check import RULES
from jaxpara.pipeline.schedule import loop, vee

FEW = ("gpipe", "1f1b", "circular")


@st.composite
def shapes(draw, kinds=tuple(KINDS)):
    """(kind, p, m, v) that `build` accepts."""
    kind = draw(st.sampled_from(kinds))
    p = draw(st.integers(1, 8))
    v = KINDS[kind].chunks or draw(st.integers(1, 4))
    m = p * draw(st.integers(1, 4)) if kind == "interleaved" else draw(st.integers(1 if kind in FEW else p, 4 * p + 3))
    return kind, p, m, v


@settings(max_examples=150, deadline=None)
@given(shapes())
def test_legal(shape):
    kind, p, m, v = shape
    schedule = build(*shape)
    assert first_fault(schedule) is None and checked(schedule) is schedule
    assert (schedule.kind, schedule.stages, schedule.microbatches, schedule.chunks) == shape[:3] + (v,)
    assert len(schedule.entries) == (3 if schedule.split else 2) * p * m * v
    assert schedule.split == (kind in ("zb_h1", "zb_h2", "zb_v", "dualpipe_v")) and schedule.source
    assert schedule.placement == (vee(p) if kind in ("zb_v", "dualpipe_v") else loop(p, v))
    assert sum(op is not None for row in schedule.rows for op in row) == len(schedule.entries)


def test_as_data():
    schedule = build("zb_v", 3, 5)
    assert [schedule.held(stage) for stage in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert build("interleaved", 2, 4, 3).held(1) == (1, 3, 5)
    assert schedule.at(0, 0) == Op("F", 0, 0) and schedule.at(1, 0) is None
    assert schedule.own(Op("F", 0, 4)) == 1 and schedule.own(Op("F", 0, 1)) == 0
    assert set(schedule.needs(Op("B", 2, 4))) == {Op("F", 2, 4), Op("B", 2, 5)} and schedule.needs(Op("B", 2, 5)) == (Op("F", 2, 5),)


def words(schedule, stage):
    return " ".join(f"{op.kind}{op.microbatch}" for op in schedule.rows[stage] if op)


def test_orders_of_the_papers():
    assert words(build("1f1b", 4, 5), 2) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"
    assert words(build("zb_h1", 3, 4), 2) == "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"
    assert words(build("zb_h2", 2, 4), 0) == "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3"
    assert words(build("gpipe", 2, 3), 1) == "F0 F1 F2 B2 B1 B0"
    assert [(op.kind, op.microbatch, op.chunk) for op in build("interleaved", 2, 2, 2).rows[1] if op] == [
        ("F", 0, 1), ("F", 1, 1), ("F", 0, 3), ("B", 0, 3), ("F", 1, 3), ("B", 1, 3), ("B", 0, 1), ("B", 1, 1)]


@pytest.mark.parametrize("p, m, v, ticks", [(4, 8, 2, 19), (4, 4, 1, 7), (4, 2, 3, 13), (1, 5, 2, 10), (3, 7, 4, 30)])
def test_trips_of_the_scan(p, m, v, ticks):
    """v·m + p - 1, or v·p + m - 1 with fewer micro-batches than stages; the backward pass mirrors them."""
    schedule = build("circular", p, m, v)
    assert schedule.forward_ticks == ticks == (v * m + p - 1 if m >= p else v * p + m - 1)
    assert schedule.ticks == 2 * ticks
    for row in schedule.rows:
        assert [op and op.kind.replace("F", "B") for op in row[:ticks]] == [op and op.kind for op in reversed(row[ticks:])]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in FEW and kind != "interleaved"])
def test_too_few_micro_batches(kind):
    assert not list(wrong(kind, 4, 4))
    (message,) = wrong(kind, 4, 3, names=("mesh.pp", "train.microbatches", "parallel.chunks"))
    assert message.startswith(f"train.microbatches = 3 is less than mesh.pp = 4: {kind} needs a micro-batch for every stage")
    assert "Legal: 4 or more (bubble " in message and "gpipe, 1f1b, circular" in message


@pytest.mark.parametrize("kind", FEW)
def test_few_micro_batches_are_legal(kind):
    assert first_fault(build(kind, 6, 2)) is None


def test_refusals():
    (message,) = wrong("interleaved", 4, 6, 2)
    assert "multiple of stages = 4" in message and "Nearest: 4 (bubble 27.3 %), 8 (bubble 15.8 %)." in message
    (message,) = wrong("interleaved", 4, 3, 2)
    assert "Nearest: 4 (bubble" in message and "0 (" not in message
    assert list(wrong("zb_v", 4, 8, 3)) == ["chunks = 3: zb_v has 2 chunks per stage. Legal: 2 (interleaved and circular take any number)."]
    assert list(wrong("1f1b", 4, 8, 2)) == ["chunks = 2: 1f1b has 1 chunk per stage. Legal: 1 (interleaved and circular take any number)."]
    assert len(list(wrong("circular", 0, -1, 0))) == 3
    assert "Legal: gpipe, 1f1b" in next(wrong("pipedream", 4, 8))
    assert "too many" in next(wrong("gpipe", 10_000, 10_000))
    with pytest.raises(ConfigError, match="less than stages = 4"):
        build("zb_h1", 4, 3)


def changed(schedule, change):
    """`schedule` with its entries put through `change`, a function from an `Entry` to entries."""
    entries = [new for entry in schedule.entries for new in change(entry)]
    return replace(schedule, entries=tuple(sorted(entries, key=lambda entry: entry[:2])))


def move(op, tick):
    return lambda entry: [entry._replace(tick=tick)] if entry.op == op else [entry]


def swap(one, two):
    other = {one: two, two: one}
    return lambda entry: [entry._replace(op=other.get(entry.op, entry.op))]


F, B, W = (lambda b, c, kind=kind: Op(kind, b, c) for kind in "FBW")
TABLE = build("zb_h1", 3, 4)        # F0 of chunk 1 runs at tick 1, of chunk 2 at tick 2; B0 of chunk 2 at 3, of chunk 1 at 4; W0 of chunk 0 at 6
FAULTS = {
    "two ops swapped": (swap(F(0, 2), B(0, 2)), "B after F", 2, 2, "B of micro-batch 0, chunk 2 needs F of micro-batch 0, chunk 2, which runs at tick 3"),
    "an op dropped": (lambda entry: [entry] * (entry.op != B(2, 1)), "missing", 1, None, "B of micro-batch 2, chunk 1 is missing"),
    "a W dropped": (lambda entry: [entry] * (entry.op != W(3, 0)), "missing", 0, None, "W of micro-batch 3, chunk 0 is missing"),
    "an op twice": (lambda entry: [entry, entry._replace(tick=40)] if entry.op == F(1, 0) else [entry], "once", 0, 40, "F of micro-batch 1, chunk 0 again"),
    "wrong stage": (lambda entry: [entry._replace(stage=0, tick=40)] if entry.op == B(3, 2) else [entry], "stage", 0, 40, "belongs to stage 2"),
    "two in a cell": (move(F(1, 0), 0), "cell", 0, 0, "F of micro-batch 1, chunk 0 and F of micro-batch 0, chunk 0 at the same time"),
    "W before B": (swap(B(0, 0), W(0, 0)), "W after B", 0, 5, "W of micro-batch 0, chunk 0 needs B"),
    "activation too early": (move(F(0, 1), 0), "F after F", 1, 0, "which runs on stage 0 at tick 0"),
    "gradient too early": (move(B(0, 1), 3), "B after B", 1, 3, "which runs on stage 2 at tick 3"),
    "no such op": (lambda entry: [entry._replace(op=entry.op._replace(kind="X"))] if entry.op == F(2, 1) else [entry], "kind", 1, None, "no X here"),
    "no such micro-batch": (lambda entry: [entry, Entry(50, 1, F(4, 1))] if entry.op == F(0, 1) else [entry], "microbatch", 1, 50, "not one of 4"),
    "no such chunk": (lambda entry: [entry, Entry(50, 1, F(0, 3))] if entry.op == F(0, 1) else [entry], "stage", 1, 50, "belongs to no stage"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults(name):
    assert first_fault(TABLE) is None
    change, rule, stage, tick, message = FAULTS[name]
    fault = first_fault(changed(TABLE, change))
    assert fault is not None and fault.rule == rule and fault.entry.stage == stage, fault
    assert tick is None or fault.entry.tick == tick
    assert message in fault.message and RULES[rule] in fault.message and fault.message.startswith(f"stage {stage}")
    with pytest.raises(ConfigError, match="schedule zb_h1, stage"):
        checked(changed(TABLE, change))


def test_every_rule_has_a_fault():
    uneven = replace(TABLE, placement=(0, 0, 1))
    assert first_fault(uneven).rule == "chunks"
    assert {fault[1] for fault in FAULTS.values()} | {"chunks"} == set(RULES)


def test_no_w_without_a_split():
    table = build("1f1b", 2, 2)
    fault = first_fault(replace(table, entries=(*table.entries, Entry(50, 0, Op("W", 0, 0)))))
    assert fault.rule == "kind" and "not split" in fault.message


@settings(max_examples=60, deadline=None)
@given(shapes(), st.randoms(use_true_random=False))
def test_any_op_at_its_need_is_found(shape, random):
    """Whatever op is moved to the tick of something it needs, the checker objects."""
    schedule = build(*shape)
    entry = random.choice([entry for entry in schedule.entries if schedule.needs(entry.op)])
    need = random.choice(schedule.needs(entry.op))
    fault = first_fault(changed(schedule, move(entry.op, schedule.tick_of[need])))
    assert fault is not None and fault.rule in ("cell", f"{entry.op.kind} after {need.kind}")
