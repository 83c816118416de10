"""A pipeline schedule as data: what each stage does at each tick. No JAX.

An op is F (forward), B (backward) or W (weight gradient) of one micro-batch through one chunk. Chunks are numbered in model order, over all
stages: the output of chunk c feeds chunk c+1. What an op makes at tick t can be used, here or on another stage, from tick t+1.
"""
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple


class Op(NamedTuple):
    """kind: "F", "B" or "W"; without a split backward, B is the whole of it. chunk: its number in model order."""
    kind: str
    microbatch: int
    chunk: int

    def __str__(self):
        return f"{self.kind} of micro-batch {self.microbatch}, chunk {self.chunk}"


class Entry(NamedTuple):
    """One filled cell of the table."""
    tick: int
    stage: int
    op: Op


@dataclass(frozen=True)
class Schedule:
    """entries: sorted by tick, then stage. placement: the stage of each chunk, in model order. split: B is only the input gradient and
    every micro-batch chunk has a W of its own. Two schedules are equal when they do the same, whatever their kind and source say."""
    entries: tuple[Entry, ...]
    placement: tuple[int, ...]
    microbatches: int
    split: bool
    kind: str = field(default="", compare=False)
    source: str = field(default="", compare=False)

    @cached_property
    def stages(self):
        return max(self.placement) + 1

    @property
    def chunks(self):
        """v: chunks on each stage."""
        return len(self.placement) // self.stages

    @cached_property
    def ticks(self):
        return self.entries[-1].tick + 1 if self.entries else 0

    @property
    def forward_ticks(self):
        """Ticks up to the last F: the trip count of the scan form, whose backward pass mirrors the forward one."""
        return 1 + max(entry.tick for entry in self.entries if entry.op.kind == "F")

    def held(self, stage):
        """The chunks a stage holds, in model order. An op's chunk is the stage's own number `held(stage).index(chunk)`."""
        return self._held[stage]

    @cached_property
    def _held(self):
        held = defaultdict(list)
        for chunk, stage in enumerate(self.placement):
            held[stage].append(chunk)
        return {stage: tuple(chunks) for stage, chunks in held.items()}

    def own(self, op):
        """An op's chunk as its stage counts: 0 … v-1."""
        return self._held[self.placement[op.chunk]].index(op.chunk)

    def at(self, stage, tick):
        """The `Op` there, or None."""
        return self.rows[stage][tick]

    @cached_property
    def rows(self):
        """Per stage, per tick: the `Op` or None."""
        rows = [[None] * self.ticks for _ in range(self.stages)]
        for tick, stage, op in self.entries:
            rows[stage][tick] = op
        return tuple(map(tuple, rows))

    @cached_property
    def tick_of(self):
        """{op: its tick}."""
        return {op: tick for tick, _, op in self.entries}

    def needs(self, op):
        """The ops that must be over before `op` starts: see `needs`."""
        return needs(op, len(self.placement))


def needs(op, chunks):
    """The ops whose results `op` takes. chunks: of the whole model."""
    kind, microbatch, chunk = op
    if kind == "F":
        return (Op("F", microbatch, chunk - 1),) if chunk else ()
    if kind == "W":
        return (Op("B", microbatch, chunk),)
    own = Op("F", microbatch, chunk)
    return (own, Op("B", microbatch, chunk + 1)) if chunk < chunks - 1 else (own,)


def loop(stages, chunks=1):
    """Placement in a loop: stage i holds chunks i, i+p, i+2p, …"""
    return tuple(range(stages)) * chunks


def vee(stages):
    """Placement in a V: stage i holds chunks i and 2p-1-i, so that stage 0 has both ends of the model."""
    return (*range(stages), *reversed(range(stages)))


def arrange(orders, placement):
    """Entries for each stage's ops in the given order, each at the first tick at which what it needs is there."""
    done, entries, following, tick = {}, [], [0] * len(orders), 0
    left = sum(map(len, orders))
    while left:
        for stage, order in enumerate(orders):
            if following[stage] == len(order):
                continue
            op = order[following[stage]]
            if all(done.get(need, tick) < tick for need in needs(op, len(placement))):
                done[op] = tick
                entries.append(Entry(tick, stage, op))
                following[stage] += 1
                left -= 1
        tick += 1
        assert tick <= 1 + 2 * sum(map(len, orders)), "these orders wait for each other"
    return tuple(entries)
