"""The tables that the program of a schedule reads, run in plain Python: every op finds what it needs where the table says; rows of the layers."""
from dataclasses import replace

import pytest
from cases import small

from jaxpara.pipeline import build, memory
from jaxpara.pipeline.builders import alternate
from jaxpara.pipeline.lockstep import IDLE, B, F, W, tables
from jaxpara.pipeline.placing import stack
from jaxpara.pipeline.schedule import Op, Schedule, arrange


class Buffer:
    """Slots of one stage. A value may be read any number of times until its last reader takes it, and must not be overwritten before."""

    def __init__(self, count):
        self.slots, self.waiting = [None] * count, [False] * count

    def put(self, slot, value):
        assert 0 <= slot < len(self.slots), f"slot {slot} of {len(self.slots)}"
        assert not self.waiting[slot], f"{value} over {self.slots[slot]}, which nobody has used yet"
        self.slots[slot], self.waiting[slot] = value, True

    def read(self, slot, value, last=False):
        assert slot >= 0 and self.waiting[slot] and self.slots[slot] == value, f"slot {slot} has {self.slots[slot]}, not {value}"
        self.waiting[slot] = not last


def replay(schedule, table):
    """Run a table as `executors.scheduled.Machine` does, on names in place of numbers. Returns the ops that ran, in order."""
    p, split, end = schedule.stages, schedule.split, len(schedule.placement)
    inputs, gradients, pairs = ([Buffer(count) for _ in range(p)] for count in (table.slots, table.gradients, table.pairs))
    ran, losses, embedded = [], [], []
    for tick in range(schedule.ticks):
        if (micro := table.begins[tick]) >= 0:
            inputs[table.first].put(table.input[tick, table.first], ("x", micro, 0))
        messages = []
        for stage in range(p):
            op, micro, slot = table.op[tick, stage], table.microbatch[tick, stage], table.pair[tick, stage]
            chunk = schedule.held(stage)[table.chunk[tick, stage]]
            messages.append({IDLE: "zeros", W: "zeros", F: ("x", micro, chunk + 1), B: ("dx", micro, chunk - 1)}[op])
            if op in (F, B):
                inputs[stage].read(table.input[tick, stage], ("x", micro, chunk), last=op == B)
            if op == B:
                gradients[stage].read(table.gradient[tick, stage], ("dx", micro, chunk), last=True)
                if split:
                    pairs[stage].put(slot, ("pair", micro, chunk))
            if op == W:
                pairs[stage].read(slot, ("pair", micro, chunk), last=True)
            if op != IDLE:
                ran.append(Op("-FBW"[op], int(micro), chunk))
        if (micro := table.losses[tick]) >= 0:
            assert messages[table.last] == ("x", micro, end)
            losses.append(micro)
            gradients[table.last].put(table.kept[tick], ("dx", micro, end - 1))
        if (micro := table.ends[tick]) >= 0:
            assert messages[table.first] == ("dx", micro, -1)
            embedded.append(micro)
        for hop in table.hops:
            source = {target: source for source, target in hop.pairs}
            assert len(source) == len(hop.pairs), "a stage receives from one stage only"
            for buffers, slots in ((inputs, hop.activation), (gradients, hop.gradient)):
                for stage in range(p):
                    if slots[tick, stage] >= 0:
                        assert hop.sends[tick]
                        buffers[stage].put(slots[tick, stage], messages[source[stage]])
    assert not any(any(buffer.waiting) for buffers in (inputs, gradients, pairs) for buffer in buffers), "something was never used"
    assert sorted(losses) == sorted(embedded) == list(range(schedule.microbatches))
    return ran


SHAPES = [("gpipe", 2, 3, 1), ("gpipe", 4, 2, 1), ("gpipe", 3, 7, 1), ("1f1b", 2, 1, 1), ("1f1b", 4, 3, 1), ("1f1b", 4, 9, 1),
          ("circular", 2, 5, 3), ("circular", 4, 2, 2), ("circular", 3, 3, 2), ("interleaved", 2, 6, 2), ("interleaved", 4, 8, 3),
          ("interleaved", 3, 3, 1), ("zb_h1", 2, 3, 1), ("zb_h1", 4, 7, 1), ("zb_h2", 3, 5, 1), ("zb_h2", 4, 4, 1), ("zb_v", 2, 3, 2),
          ("zb_v", 4, 9, 2), ("dualpipe_v", 2, 3, 2), ("dualpipe_v", 4, 8, 2)]


def orders(p, m, placement, split):
    """Of each stage: 1F1B along the chunks where a stage has one; where it has several, all their forwards before the first backward."""
    last, found, lag = len(placement) - 1, [], 1 if split else None
    for stage in range(p):
        held = [chunk for chunk, on in enumerate(placement) if on == stage]
        own = [[Op(kind, b, chunk) for kind, b in alternate(m, m if held[1:] else last - chunk, lag)] for chunk in held]
        forward = [op for order in own for op in order if op.kind == "F"]
        rest = [op for order in reversed(own) for op in order if op.kind != "F"]
        found.append(forward + rest if held[1:] else own[0])
    return found


def odd(placement, m, split=False):
    """A legal schedule whose chunks lie on stages in no usual order."""
    entries = arrange(orders(max(placement) + 1, m, placement, split), placement)
    return Schedule(tuple(sorted(entries, key=lambda entry: entry[:2])), placement, m, split)


ODD = [odd((0, 2, 1), 4), odd((2, 0, 1), 3, split=True), odd((1, 0, 0, 1), 3), odd((0, 0, 1, 1), 2, split=True), odd((1, 2, 0, 0, 1, 2), 4)]
EVERY = [build(*shape) for shape in SHAPES] + ODD
NAMES = ["-".join(map(str, shape)) for shape in SHAPES] + ["odd-" + "".join(map(str, schedule.placement)) for schedule in ODD]


@pytest.mark.parametrize("schedule", EVERY, ids=NAMES)
def test_every_op_finds_what_it_needs(schedule):
    table = tables(schedule)
    ran = replay(schedule, table)
    assert ran == [entry.op for entry in schedule.entries]
    held = memory(schedule)
    needed = held.buffers, max(held.gradients), max(held.pairs)
    assert (table.slots, table.gradients, table.pairs) == needed, "no more slots than are in use at one time"


@pytest.mark.parametrize("damage, reader", [("input", F), ("input", B), ("gradient", B), ("pair", B), ("pair", W), ("kept", None),
                                            ("activation", None)])
def test_the_replay_sees_a_wrong_slot(damage, reader):
    """One number of the table changed: the replay must not pass, or the test above shows nothing."""
    schedule = build("dualpipe_v", 4, 8)
    table = tables(schedule)
    if damage == "activation":
        hop = next(hop for hop in table.hops if (hop.activation >= 0).any())
        changed = replace(hop, activation=moved(hop.activation, hop.activation >= 0, table.slots))
        wrong = replace(table, hops=tuple(changed if one is hop else one for one in table.hops))
    else:
        array, count = getattr(table, damage), {"input": table.slots, "pair": table.pairs}.get(damage, table.gradients)
        wrong = replace(table, **{damage: moved(array, array >= 0 if reader is None else table.op == reader, count)})
    with pytest.raises(AssertionError):
        replay(schedule, wrong)


def moved(array, where, count):
    """A table of slots with one entry, in the middle of those in `where`, one slot further; there must be a second slot."""
    assert count > 1
    changed, filled = array.copy(), where.nonzero()
    place = tuple(axis[len(axis) // 2] for axis in filled)
    changed[place] = (changed[place] + 1) % count
    return changed


def layers(**overrides):
    return stack(small.run(**overrides))


def test_layers_lie_stage_by_stage_and_on_a_stage_chunk_by_chunk():
    piped = dict(mesh__pp=2, model__layers=8, train__microbatches=2, parallel__schedule="circular", parallel__chunks=2)
    assert layers(**piped).rows == (0, 1, 4, 5, 2, 3, 6, 7) and layers(**piped).row_of == (0, 1, 4, 5, 2, 3, 6, 7)
    in_a_v = layers(**{**piped, "parallel__schedule": "zb_v"})
    assert in_a_v.rows == (0, 1, 6, 7, 2, 3, 4, 5) and (in_a_v.length, in_a_v.chunks, in_a_v.padded) == (2, 2, False)
    assert in_a_v.row_of == (0, 1, 4, 5, 6, 7, 2, 3)
    assert layers(model__layers=3).rows == (0, 1, 2)


@pytest.mark.parametrize("given, rows, length", [(None, (0, 1, -1, 2, 3, 4), 3), ((3, 2), (0, 1, 2, 3, 4, -1), 3),
                                                 ((1, 4), (0, -1, -1, -1, 1, 2, 3, 4), 4)])
def test_shorter_chunks_are_padded_at_their_end(given, rows, length):
    found = layers(mesh__pp=2, model__layers=5, train__microbatches=2, parallel__schedule="1f1b", parallel__layers_per_stage=given)
    assert (found.rows, found.length, found.padded) == (rows, length, True)


@pytest.mark.parametrize("kind, count, chunks", [("zb_v", 11, 2), ("interleaved", 9, 2), ("gpipe", 2, 1), ("circular", 7, 3)])
def test_row_of_undoes_rows(kind, count, chunks):
    found = layers(mesh__pp=2, train__microbatches=2, model__layers=count, parallel__schedule=kind, parallel__chunks=chunks)
    assert [found.rows[row] for row in found.row_of] == list(range(count))
    assert found.rows.count(-1) == len(found.rows) - count and len(found.rows) == 2 * found.chunks * found.length
