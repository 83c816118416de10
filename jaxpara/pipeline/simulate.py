"""What a schedule costs: time with given op times, and how much each stage holds. No JAX."""
from dataclasses import dataclass
from itertools import accumulate
from typing import Sequence

from jaxpara.errors import ConfigError
from jaxpara.pipeline.schedule import Op

Amount = float | Sequence[float]


@dataclass(frozen=True)
class Times:
    """Seconds, or any one unit. forward, backward, weight: one micro-batch through one stage, its v chunks together; a number, one per
    stage (uneven stages, stages of different device counts), or, for v > 1, one per chunk in model order, which is then that chunk's
    own time. Without a split backward, B takes backward + weight. hop: from a stage to another, either way; a number, or one per
    sending stage."""
    forward: Amount = 1.0
    backward: Amount = 1.0
    weight: Amount = 1.0
    hop: Amount = 0.0


@dataclass(frozen=True)
class Simulation:
    """starts, ends: {op: time}. makespan: from the first start to the last end of all stages. busy: per stage.

    span: the longest that one stage takes from its own first start to its own last end. Steps that follow one another without a barrier
    take this long each, and it is the cost of the zero-bubble papers; it is the makespan except where every stage ends later than
    the one before (zb_h2).
    lockstep: the sum over ticks of the longest op in each, and a hop: what a program takes whose stages meet after every tick.
    """
    starts: dict[Op, float]
    ends: dict[Op, float]
    makespan: float
    span: float
    busy: tuple[float, ...]
    lockstep: float

    @property
    def idle(self):
        """Per stage, of the makespan."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble(self):
        """What the span has over the work of the busiest stage."""
        return self.span - max(self.busy)

    @property
    def bubble_fraction(self):
        """Part of the span; fraction of the ideal is bubble / max(busy)."""
        return self.bubble / self.span


def simulate(schedule, times=Times()):
    """The `Simulation` of a legal schedule: every stage keeps the table's order of its ops and starts each as soon as it is free and
    what the op needs has arrived. Ticks matter only for `lockstep`.

    Gives the bubble rates of Qi et al. 2023 (arXiv 2401.10241) to four digits, and the closed forms where hop = 0.
    """
    last = {"F": per_chunk(schedule, times.forward, "forward"), "W": per_chunk(schedule, times.weight, "weight"),
            "B": per_chunk(schedule, times.backward, "backward")}
    if not schedule.split:
        last["B"] = tuple(b + w for b, w in zip(last["B"], last["W"]))
    hops = per_stage(schedule, times.hop, "hop")
    free, first, busy = [0.0] * schedule.stages, [None] * schedule.stages, [0.0] * schedule.stages
    starts, ends, longest = {}, {}, {}
    for tick, stage, op in schedule.entries:
        start = free[stage]
        for need in schedule.needs(op):
            sender = schedule.placement[need.chunk]
            start = max(start, ends[need] + (hops[sender] if sender != stage else 0))
        length = last[op.kind][op.chunk]
        starts[op], ends[op], free[stage] = start, start + length, start + length
        first[stage] = start if first[stage] is None else first[stage]
        busy[stage] += length
        longest[tick] = max(longest.get(tick, 0), length)
    lockstep = sum(longest.values()) + schedule.ticks * max(hops) * (schedule.stages > 1)
    span = max(end - start for start, end in zip(first, free))
    return Simulation(starts, ends, max(free) - min(first), span, tuple(busy), lockstep)


def per_stage(schedule, amount, name):
    """One value per stage."""
    values = (amount,) * schedule.stages if isinstance(amount, (int, float)) else tuple(amount)
    if len(values) != schedule.stages or min(values) < 0:
        raise ConfigError(f"times.{name} = {values} must be one number, or one for each of {schedule.stages} stages, none negative.")
    return values


def per_chunk(schedule, amount, name):
    """One value per chunk in model order."""
    total = len(schedule.placement)
    if not isinstance(amount, (int, float)) and schedule.chunks > 1 and len(amount) == total and min(amount) >= 0:
        return tuple(amount)
    stages = per_stage(schedule, amount, name)
    return tuple(stages[stage] / schedule.chunks for stage in schedule.placement)


@dataclass(frozen=True)
class Memory:
    """Peak counts per stage, in micro-batch chunks (1/v of a micro-batch through the stage), from the ticks of the table.

    live: activations from F until the last op that uses them, B or, where backward is split, W: the papers' count.
    inputs: from F to B. slots: inputs of chunks from their arrival to B; those of the first chunk are the batch's and count from F.
    gradients: output gradients from their arrival to B; those of the last chunk come from the loss, right after its F.
    pairs: from B to W, (input, output gradient) pairs of its matmuls; 0 without W.
    """
    live: tuple[int, ...]
    inputs: tuple[int, ...]
    slots: tuple[int, ...]
    gradients: tuple[int, ...]
    pairs: tuple[int, ...]

    @property
    def buffers(self):
        """Slots of one program for all stages: the most that any of them needs."""
        return max(self.slots)


def memory(schedule):
    """The `Memory` of a legal schedule."""
    final = "W" if schedule.split else "B"
    return Memory(live=_peaks(schedule, spans(schedule, "F", final)), inputs=_peaks(schedule, spans(schedule, "F", "B")),
                  slots=_peaks(schedule, spans(schedule, "arrival", "B")), gradients=_peaks(schedule, spans(schedule, "gradient", "B")),
                  pairs=_peaks(schedule, spans(schedule, "B", "W") if schedule.split else {}))


def spans(schedule, begin, end):
    """{(micro-batch, chunk): (first tick, last tick)} in which something is kept. begin: "F" or "B", the tick of that op; "arrival" or
    "gradient", the tick after the op that sends it, or, of the last chunk, after the F whose loss it comes from. end: the tick of that op."""
    found, last = {}, len(schedule.placement) - 1
    for op, tick in schedule.tick_of.items():
        if op.kind != end:
            continue
        _, microbatch, chunk = op
        at = lambda kind, of: schedule.tick_of[Op(kind, microbatch, of)]
        if begin == "arrival":
            first = at("F", chunk - 1) + 1 if chunk else at("F", 0)
        elif begin == "gradient":
            first = 1 + (at("B", chunk + 1) if chunk < last else at("F", last))
        else:
            first = at(begin, chunk)
        found[microbatch, chunk] = first, tick
    return found


def _peaks(schedule, kept):
    """The most spans that overlap, per stage."""
    changes = [[0] * (schedule.ticks + 1) for _ in range(schedule.stages)]
    for (_, chunk), (first, last) in kept.items():
        row = changes[schedule.placement[chunk]]
        row[first] += 1
        row[last + 1] -= 1
    return tuple(max(accumulate(row)) for row in changes)


def assign(schedule, kept):
    """{key of `spans`: slot number}: no two spans that overlap on a stage share a slot, and a stage uses no more than its peak."""
    free, taken, slots, used = {}, {}, {}, {}
    for key in sorted(kept, key=kept.get):
        first, last = kept[key]
        stage = schedule.placement[key[1]]
        released = [slot for slot, until in taken.get(stage, {}).items() if until < first]
        for slot in released:
            del taken[stage][slot]
        pool = free.setdefault(stage, [])
        pool += released
        if pool:
            slot = min(pool)
            pool.remove(slot)
        else:
            slot = used.get(stage, 0)
            used[stage] = slot + 1
        slots[key] = slot
        taken.setdefault(stage, {})[slot] = last
    return slots
