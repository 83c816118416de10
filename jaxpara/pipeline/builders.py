"""The shipped schedules: who does what in which order, from p stages, m micro-batches and v chunks per stage. No JAX.

Each builder gives the ops of one stage in order; `schedule.arrange` finds the ticks. The two that run all forwards first give the ticks
themselves, as the scan over ticks does.
"""
from typing import Callable, NamedTuple

from jaxpara.errors import ConfigError
from jaxpara.pipeline.formulas import bubble_fraction
from jaxpara.pipeline.schedule import Entry, Op, Schedule, arrange, loop, vee

LARGEST = 2_000_000
"""Micro-batch chunks in one table: beyond this it is a typing error."""


def scan(p, m, v):
    """Entries of the scan form: micro-batches go round the stages v times, the next round starts when all m, and at least p, are in;
    the backward pass is the forward pass mirrored."""
    turn = max(m, p)
    forward = (v - 1) * turn + m + p - 1
    entries = []
    for chunk in range(p * v):
        turns, stage = divmod(chunk, p)
        for microbatch in range(m):
            tick = turns * turn + microbatch + stage
            entries.append(Entry(tick, stage, Op("F", microbatch, chunk)))
            entries.append(Entry(2 * forward - 1 - tick, stage, Op("B", microbatch, chunk)))
    return tuple(sorted(entries))


def alternate(count, warm, lag=None):
    """`warm` forwards, then one forward and one backward in turn, then the remaining backwards, as (kind, index). lag: the W of
    index i - lag follows the B of index i, the remaining W come last; None: no W."""
    order = [("F", i) for i in range(min(warm, count))]
    for i in range(count):
        order += [("F", i + warm)] * (i + warm < count) + [("B", i)]
        if lag is not None and i >= lag:
            order.append(("W", i - lag))
    return order + [("W", i) for i in range(max(count - lag, 0), count)] if lag is not None else order


def one_f_one_b(p, m, v, stage):
    return [Op(kind, b, stage) for kind, b in alternate(m, p - 1 - stage)]


def zb_h1(p, m, v, stage):
    """1F1B's warm-up; W later the later the stage, so that the B of every stage come early and the W fill the end."""
    return [Op(kind, b, stage) for kind, b in alternate(m, p - 1 - stage, lag=stage)]


def zb_h2(p, m, v, stage):
    """Twice the warm-up, twice the lag: also the wait before the first B is filled, with forwards."""
    return [Op(kind, b, stage) for kind, b in alternate(m, 2 * (p - 1 - stage), lag=2 * stage)]


def interleaved(p, m, v, stage):
    """Micro-batches in groups of p through the stage's first chunk, then the same p through its second, …; backward the other way."""
    order = []
    warm = 2 * (p - 1 - stage) + (v - 1) * p if v > 1 else p - 1 - stage
    for kind, i in alternate(m * v, warm):
        group, place = divmod(i, p * v)
        turn, microbatch = divmod(place, p)
        order.append(Op(kind, group * p + microbatch, p * (turn if kind == "F" else v - 1 - turn) + stage))
    return order


class Counter:
    """Writes down ops of a V by short names ("F0 B1": forward of the stage's first chunk, backward of its second), counting the
    micro-batches of each; those from m on are left out, which lets a pattern be written for more micro-batches than there are."""

    def __init__(self, p, m, stage):
        self.chunks, self.m, self.order, self.counts = (stage, 2 * p - 1 - stage), m, [], {}

    def do(self, names, times=1):
        for name in names.split() * times:
            microbatch = self.counts.get(name, 0)
            self.counts[name] = microbatch + 1
            if microbatch < self.m:
                self.order.append(Op(name[0], microbatch, self.chunks[int(name[1])]))


def zb_v(p, m, v, stage):
    steps, n = Counter(p, m, stage), max(m, 2 * p - 1)
    steps.do("F0", 2 * (p - stage) - 1)
    steps.do("F1 F0", stage)
    steps.do("F1 B1 W1", p - stage)
    steps.do("F0 B0 W0 F1 B1 W1", n - p)
    steps.do("B0 B1", stage)
    steps.do("B0 W0", p - stage)
    steps.do("W1", stage)
    steps.do("W0", stage)
    return steps.order


def dualpipe_v(p, m, v, stage):
    """DualPipe cut in half. A pair that the original overlaps, F of one chunk and the whole backward of the other, is F, B, W here."""
    steps, n, rest = Counter(p, m, stage), max(m, 2 * p), p - 1 - stage
    steps.do("F0", 2 * rest)
    steps.do("F0 F1", stage + 1)
    steps.do("B1 W1 F1", rest)
    steps.do("F0 B1 W1 F1 B0 W0", n - 2 * p + stage + 1)
    steps.do("B1 W1 F1 B0 W0", rest)
    ending = ["B1", "B0"] * (stage + 1)
    for name in ending[:stage + 1]:
        steps.do(f"{name} W{name[1]}")
    steps.do(" ".join(ending[stage + 1:]))
    waiting = [f"W{name[1]}" for name in ending[stage + 1:]] + ["W0"] * rest
    for name in waiting[:rest]:
        steps.do(f"{name} B0")
    steps.do(" ".join(waiting[rest:]))
    return steps.order


class Kind(NamedTuple):
    """One shipped schedule. order: ops of a stage (None: the scan form). chunks: the only legal v, None: any. shape: placement."""
    order: Callable | None
    split: bool
    shape: str
    chunks: int | None
    any_m: bool
    source: str


KINDS = {
    "gpipe": Kind(None, False, "loop", 1, True, "Huang et al. 2019 (arXiv 1811.06965)"),
    "1f1b": Kind(one_f_one_b, False, "loop", 1, True, "Narayanan et al. 2021 (arXiv 2104.04473), PipeDream-Flush"),
    "interleaved": Kind(interleaved, False, "loop", None, False, "Narayanan et al. 2021 (arXiv 2104.04473), section 2.2"),
    "circular": Kind(None, False, "loop", None, True, "GPipe going round v times, as praxis and MaxText scan it"),
    "zb_h1": Kind(zb_h1, True, "loop", 1, False, "Qi et al. 2023 (arXiv 2401.10241), section 2"),
    "zb_h2": Kind(zb_h2, True, "loop", 1, False, "Qi et al. 2023 (arXiv 2401.10241), section 2"),
    "zb_v": Kind(zb_v, True, "vee", 2, False, "Qi et al. 2023 (arXiv 2401.10241), section 6; V-ZB of Qi et al. 2024 (arXiv 2405.15362)"),
    "dualpipe_v": Kind(dualpipe_v, True, "vee", 2, False, "DeepSeek-V3 (arXiv 2412.19437) DualPipe, cut in half by Sea AI Lab; no pair overlapped"),
}
NAMES = ("stages", "microbatches", "chunks")


def default_chunks(kind):
    """v where nobody says: 2 where a schedule is made for several chunks, else 1."""
    return KINDS[kind].chunks or (2 if kind == "interleaved" else 1)


def wrong(kind, stages, microbatches, chunks=None, names=NAMES):
    """Yield why there is no such schedule. names: what the caller calls the three numbers and, if it has a name for it, the kind, e.g.
    ("mesh.pp", "train.microbatches", "parallel.chunks", "parallel.schedule")."""
    if kind not in KINDS:
        yield f"{names[3] if names[3:] else 'schedule'} = {kind} is unknown. Legal: {', '.join(KINDS)}."
        return
    said = f"{names[3]} = {kind}" if names[3:] else kind
    named = list(zip(names, (stages, microbatches, chunks if chunks is not None else default_chunks(kind))))
    low = [f"{name} = {value} must be greater than 0. Legal: 1 or more." for name, value in named if value < 1]
    (p_name, p), (m_name, m), (v_name, v) = named
    only = KINDS[kind].chunks
    yield from low
    if only and v != only and v > 0:
        yield f"{v_name} = {v}: {said} has {only} chunk{'s' * (only > 1)} per stage. Legal: {only} (interleaved and circular take any number)."
    if low:
        return
    if p * m * v > LARGEST:
        yield f"{p_name} · {m_name} · {v_name} = {p * m * v:,} micro-batch chunks are too many for a table. Legal: up to {LARGEST:,}."
    elif kind == "interleaved" and m % p:
        near = [m // p * p] * (m > p) + [(m // p + 1) * p]
        at = ", ".join(f"{n} (bubble {100 * bubble_fraction(kind, p, n, v):.1f} %)" for n in near)
        yield (f"{m_name} = {m} is not a multiple of {p_name} = {p}: {said} sends micro-batches through each chunk in groups of {p}. "
               f"Nearest: {at}.")
    elif not KINDS[kind].any_m and m < p:
        bubble = bubble_fraction(kind, p, p, only or v)
        yield (f"{m_name} = {m} is less than {p_name} = {p}: {said} needs a micro-batch for every stage, or its warm-up has nothing to fill it. "
               f"Legal: {p} or more (bubble {100 * bubble:.1f} % at {p}); gpipe, 1f1b, circular take any number.")


def build(kind, stages, microbatches, chunks=None, names=NAMES):
    """The `Schedule` of a shipped kind. chunks: per stage; None = `default_chunks`. ConfigError with everything wrong (`wrong`)."""
    if errors := list(wrong(kind, stages, microbatches, chunks, names)):
        raise ConfigError(*errors)
    chosen, v = KINDS[kind], default_chunks(kind) if chunks is None else chunks
    placement = vee(stages) if chosen.shape == "vee" else loop(stages, v)
    if chosen.order:
        entries = arrange([chosen.order(stages, microbatches, v, stage) for stage in range(stages)], placement)
    else:
        entries = scan(stages, microbatches, v)
    return Schedule(entries, placement, microbatches, chosen.split, kind, chosen.source)
