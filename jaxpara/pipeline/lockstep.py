"""A schedule as the tables that a program in lockstep reads: one row per tick, one column per stage. numpy, no JAX."""
from dataclasses import dataclass
from functools import cache

import numpy as np

from jaxpara.pipeline.schedule import Op
from jaxpara.pipeline.simulate import assign, spans

IDLE, F, B, W = range(4)
KINDS = {"F": F, "B": B, "W": W}


@dataclass(frozen=True)
class Hop:
    """What travels between stages a fixed distance apart: the pairs that ever have something to send, in which ticks somebody does, and where
    what arrives at the end of a tick is kept.

    distance: stages further on, the last being followed by the first. sent: messages of each stage. pairs: (source, target) stages. sends: bool
    [ticks]. activation, gradient: int [ticks, stages], the slot on the target; -1: nothing arrives.
    """
    distance: int
    sent: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]
    sends: np.ndarray
    activation: np.ndarray
    gradient: np.ndarray


@dataclass(frozen=True)
class Tables:
    """op: int [ticks, stages] of IDLE, F, B, W; microbatch, chunk (the stage's own number): of the op. input, gradient, pair: the slots that the
    op reads or writes; -1: none. begins, ends, losses: int [ticks], the micro-batch whose embedding is looked up before the tick's
    op, whose embedding gradient is summed after it, whose loss is taken after it; -1: none. kept: int [ticks], the slot of that loss's gradient.
    slots, gradients, pairs: how many of each a stage keeps. first, last: the stages of the first and the last chunk.
    """
    op: np.ndarray
    microbatch: np.ndarray
    chunk: np.ndarray
    input: np.ndarray
    gradient: np.ndarray
    pair: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    losses: np.ndarray
    kept: np.ndarray
    hops: tuple[Hop, ...]
    slots: int
    gradients: int
    pairs: int
    first: int
    last: int


@cache
def tables(schedule):
    """The `Tables` of a legal schedule."""
    shape, last = (schedule.ticks, schedule.stages), len(schedule.placement) - 1
    kept = {name: assign(schedule, spans(schedule, begin, "B")) for name, begin in (("input", "arrival"), ("gradient", "gradient"))}
    kept["pair"] = assign(schedule, spans(schedule, "B", "W")) if schedule.split else {}
    cells = {name: np.full(shape, -1, np.int32) for name in kept}
    op, microbatch, chunk = (np.zeros(shape, np.int32) for _ in range(3))
    whole = {name: np.full(schedule.ticks, -1, np.int32) for name in ("begins", "ends", "losses", "kept")}
    for tick, stage, entry in schedule.entries:
        at, key = (tick, stage), entry[1:]
        op[at], microbatch[at], chunk[at] = KINDS[entry.kind], entry.microbatch, schedule.own(entry)
        for name, slots in kept.items():
            cells[name][at] = slots.get(key, -1)
        if entry.kind == "F" and entry.chunk == 0:
            whole["begins"][tick] = entry.microbatch
        if entry.kind == "F" and entry.chunk == last:
            whole["losses"][tick], whole["kept"][tick] = entry.microbatch, kept["gradient"][key]
        if entry.kind == "B" and entry.chunk == 0:
            whole["ends"][tick] = entry.microbatch
    count = lambda slots: 1 + max(slots.values(), default=-1)
    return Tables(op, microbatch, chunk, **cells, **whole, hops=hops(schedule, kept), slots=count(kept["input"]),
                  gradients=count(kept["gradient"]), pairs=count(kept["pair"]), first=schedule.placement[0], last=schedule.placement[-1])


def hops(schedule, kept):
    """A `Hop` for each distance that something travels; what stays on its stage travels 0."""
    found, p = {}, schedule.stages
    for tick, stage, op in schedule.entries:
        step = {"F": 1, "B": -1}.get(op.kind)
        neighbour = op.chunk + (step or 0)
        if step is None or not 0 <= neighbour < len(schedule.placement):
            continue
        target = schedule.placement[neighbour]
        sent, pairs, sends, *slots = found.setdefault((target - stage) % p, ([0] * p, set(), np.zeros(schedule.ticks, bool),
                                                      *(np.full((schedule.ticks, p), -1, np.int32) for _ in range(2))))
        pairs.add((stage, target))
        sent[stage] += 1
        sends[tick] = True
        name = "input" if op.kind == "F" else "gradient"
        slots[name == "gradient"][tick, target] = kept[name][Op("", op.microbatch, neighbour)[1:]]
    return tuple(Hop(distance, tuple(sent), tuple(sorted(pairs)), *arrays) for distance, (sent, pairs, *arrays) in sorted(found.items()))
