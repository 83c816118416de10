"""Proof that a schedule's table is legal, or the first rule that it breaks. No JAX."""
from collections import Counter
from dataclasses import dataclass

from jaxpara.errors import ConfigError
from jaxpara.pipeline.schedule import Entry, Op

RULES = {
    "kind": "ops are F, B and W",
    "microbatch": "micro-batches are numbered from 0, none left out",
    "cell": "a stage does one op per tick",
    "stage": "an op runs on the stage that holds its chunk",
    "chunks": "every stage holds the same number of chunks",
    "once": "every op happens once",
    "missing": "every micro-batch goes through F and B, and W where backward is split, of every chunk",
    "F after F": "an activation travels one tick",
    "B after F": "backward follows the forward of the same chunk",
    "B after B": "a gradient travels one tick",
    "W after B": "a weight gradient follows the input gradient of the same chunk",
}


@dataclass(frozen=True)
class Fault:
    """The first broken rule. entry: where; for a missing op, its stage with tick None."""
    rule: str
    words: str
    entry: Entry

    @property
    def message(self):
        tick = "" if self.entry.tick is None else f", tick {self.entry.tick}"
        return f"stage {self.entry.stage}{tick}: {self.words}. Rule: {RULES[self.rule]}."


def first_fault(schedule):
    """The first `Fault` of a schedule, None if it is legal. What each cell holds comes first, then what is missing, then the order."""
    for search in (_chunks, _cells, _missing, _order):
        for fault in search(schedule):
            return fault
    return None


def checked(schedule):
    """The schedule; ConfigError with its first fault if it has one."""
    if fault := first_fault(schedule):
        raise ConfigError(f"schedule {schedule.kind or 'table'}, {fault.message}")
    return schedule


def _chunks(schedule):
    counts = Counter(schedule.placement)
    for stage in range(schedule.stages):
        if counts[stage] != counts[0]:
            words = f"{counts[stage]} chunk{'s' * (counts[stage] != 1)}"
            yield Fault("chunks", f"it holds {words} and stage 0 holds {counts[0]}", Entry(None, stage, None))


def _cells(schedule):
    placement, seen, filled = schedule.placement, {}, {}
    kinds = "FBW" if schedule.split else "FB"
    for entry in schedule.entries:
        tick, stage, op = entry
        if op.kind not in kinds:
            yield Fault("kind", f"there is no {op.kind} here: backward is {'' if schedule.split else 'not '}split", entry)
        if not 0 <= op.microbatch < schedule.microbatches:
            yield Fault("microbatch", f"{op} is not one of {schedule.microbatches} micro-batches", entry)
        if (stage, tick) in filled:
            yield Fault("cell", f"{op} and {filled[stage, tick]} at the same time", entry)
        if not 0 <= op.chunk < len(placement) or placement[op.chunk] != stage:
            at = f"stage {placement[op.chunk]}" if 0 <= op.chunk < len(placement) else "no stage"
            yield Fault("stage", f"{op} belongs to {at}", entry)
        if op in seen:
            yield Fault("once", f"{op} again, after tick {seen[op]}", entry)
        filled[stage, tick], seen[op] = op, tick


def _missing(schedule):
    for chunk, stage in enumerate(schedule.placement):
        for microbatch in range(schedule.microbatches):
            for kind in "FBW" if schedule.split else "FB":
                if (op := Op(kind, microbatch, chunk)) not in schedule.tick_of:
                    yield Fault("missing", f"{op} is missing", Entry(None, stage, op))


def _order(schedule):
    for entry in schedule.entries:
        for need in schedule.needs(entry.op):
            tick = schedule.tick_of[need]
            if tick >= entry.tick:
                place = schedule.placement[need.chunk]
                at = f"on stage {place} at tick {tick}" if place != entry.stage else f"at tick {tick}"
                yield Fault(f"{entry.op.kind} after {need.kind}", f"{entry.op} needs {need}, which runs {at}", entry)
