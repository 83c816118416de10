"""What compilers are known to make of a collective: the printed list that `--strict` lets pass. No JAX.

On CPU under the manual lowering only a change of width is to be expected: everything else must be as predicted.
"""
from dataclasses import dataclass, replace

from jaxpara.plan.lines import Line

KNOWN = {
    "widened": "travels in a wider type: XLA:CPU has no 16-bit collectives",
    "narrowed": "travels in bfloat16: XLA:TPU at default precision rounds what only matrix units will read, and sums of what was bfloat16",
    "all-reduce + slice": "a reduce-scatter that XLA:CPU writes as an all-reduce of which each device keeps its piece",
    "reduce-scatter as all-reduce": "twice the bytes; XLA:TPU does so for vectors, and when the group spans the whole slice "
                                    "(parallel.scatter_inner avoids that)",
    "all-gather as all-reduce": "XLA does so for small vectors: each device adds its piece to zeros",
    "all-gather as permutes": "a gather in n-1 hops under its matmul (collective matmul)",
    "reduce-scatter as permutes": "a scatter in n-1 hops under its matmul (collective matmul)",
    "out of the loop": "done once, before or after the loop, instead of in each pass",
    "padded": "a dim is filled up to whole tiles, at most 15 % more; permutes put the pieces back in place",
    "concatenated": "several small arrays are laid end to end and sent as one",
    "scalars": "sums of single numbers are grouped otherwise",
}
"""Name: what happens and why."""

PADDING = 1.15
SCALARS = 64
"""Elements up to which an all-reduce is one of single numbers laid end to end, or as many as the predicted ones have together."""

FEW = 1024
"""Elements up to which what is told once a step (losses of every layer's router) may be laid beside single numbers."""


@dataclass(frozen=True)
class Pair:
    """A predicted line and the compiled one that does it, each with the calls that belong together."""
    predicted: Line | None      # None: a permute that belongs to padding, a scalar
    compiled: Line | None       # None: a scalar that was merged away
    rewrites: tuple[str, ...] = ()      # of KNOWN: in what they differ


def rewrites(ours, theirs, run, platform):
    """Take from both pools what known rewrites explain; [Pair]. Pools map lines to calls not matched yet."""
    if platform == "cpu" and run.parallel.lowering == "manual":
        return []
    taken = []
    for rule in RULES:
        taken += one_by_one(ours, theirs, *rule)
    # several that add up exactly come before one that is nearly as large
    taken += out_of_the_loop(ours, theirs, run) + concatenated(ours, theirs) + one_by_one(ours, theirs, "padded", padded, lambda line: 1)
    return [*taken, *realigned(theirs, taken), *scalars(ours, theirs)]


def one_by_one(ours, theirs, name, explains, ratio):
    """[Pair] of each predicted line with each compiled one that a rule fits."""
    return [pair for line in ours.lines() for other in theirs.lines() if explains(line, other)
            for pair in take(name, ours, theirs, line, other, ratio(line))]


def take(name, ours, theirs, line, other, ratio):
    """[Pair] of as many calls as both have left, one predicted call being `ratio` compiled ones."""
    calls = min(ours.left[line], theirs.left[other] // ratio)
    ours.left[line] -= calls
    theirs.left[other] -= calls * ratio
    return [Pair(replace(line, calls=calls), replace(other, calls=calls * ratio), (name,))] if calls else []


def kinds(predicted, compiled):
    """A rule: the same data over the same axes by another kind."""
    return lambda line, other: ((line.kind, other.kind) == (predicted, compiled) and line.axes == other.axes
                                and other.elements == line.elements)


def hops(kind):
    """A rule: n-1 permutes of a device's piece."""
    return lambda line, other: ((line.kind, other.kind) == (kind, "permute") and line.axes == other.axes
                                and other.elements * line.n == line.elements)


def padded(line, other):
    return (line.kind == other.kind and line.axes == other.axes and line.elements < other.elements <= PADDING * line.elements
            and line.elements > line.n)


RULES = (
    ("reduce-scatter as all-reduce", kinds("reduce-scatter", "all-reduce"), lambda line: 1),
    ("all-gather as all-reduce", kinds("all-gather", "all-reduce"), lambda line: 1),
    ("all-gather as permutes", hops("all-gather"), lambda line: line.n - 1),
    ("reduce-scatter as permutes", hops("reduce-scatter"), lambda line: line.n - 1),
)
"""(name, whether a predicted and a compiled line fit, compiled calls per predicted call)."""


def out_of_the_loop(ours, theirs, run):
    """Predicted calls that lack although the line was compiled: done once for all passes. Only where its line stands in fewer loops."""
    found, accumulates = [], run.train.microbatches > 1
    loops = {"step": 0, "micro-batch": accumulates, "layer": 1 + accumulates, "block": 1 + accumulates}
    for line in ours.lines():
        for other in theirs.left:
            alike = other.kind == line.kind or other.kind == "all-reduce" and line.kind in ("reduce-scatter", "all-gather")
            same = alike and (line.axes, line.elements) == (other.axes, other.elements) and other.owner in ("", line.owner)
            depth = 0 if other.when == "step" else len(other.when.split(" · "))
            if same and ours.left[line] and other.calls < line.calls and depth < loops[line.when]:
                found.append(Pair(replace(line, calls=ours.left[line]), replace(other, calls=0), ("out of the loop",)))
                ours.left[line] = 0
    return found


def concatenated(ours, theirs):
    """A compiled call of as many elements as several predicted ones, of one kind and over the same axes, have together; sums of single numbers,
    which are grouped otherwise, may lie beside them."""
    found = []
    for other in theirs.lines():
        parts = [line for line in ours.lines() if (line.kind, line.axes) == (other.kind, other.axes) and line.elements < other.elements
                 and ours.left[line] == theirs.left[other]]
        chosen = adding_up(parts, other.elements)
        for line in chosen:
            found.append(Pair(replace(line, calls=ours.left[line]), replace(other, elements=line.elements), ("concatenated",)))
            ours.left[line] = 0
        if chosen:
            theirs.left[other] = 0
    return found


def adding_up(lines, elements):
    """Those of `lines` that have `elements` together, or of several all but `SCALARS` at most, or ()."""
    sums = {0: ()}
    for line in lines:
        for so_far, chosen in list(sums.items()):
            if so_far + line.elements <= elements:
                sums.setdefault(so_far + line.elements, (*chosen, line))
    nearest = max(sums)
    return sums[nearest] if nearest == elements or len(sums[nearest]) > 1 and elements - nearest <= SCALARS else ()


def realigned(theirs, taken):
    """The permutes of a padded reduce-scatter: less than a piece, over the same axes, nobody's."""
    pieces = {}
    for one in taken:
        if "padded" in one.rewrites:
            pieces[one.compiled.axes] = max(pieces.get(one.compiled.axes, 0), one.compiled.elements // one.compiled.n)
    found = []
    for line in theirs.lines():
        if line.kind == "permute" and not line.owner and line.elements <= pieces.get(line.axes, 0):
            found.append(Pair(None, replace(line, calls=theirs.left[line]), ("padded",)))
            theirs.left[line] = 0
    return found


def scalars(ours, theirs):
    """Sums of few numbers, on either side. A compiled sum of one number may have the name of a gradient that it was combined with."""
    found = []
    few = lambda line: line.elements == 1 or line.elements <= FEW and line.phase in ("loss", "optimizer")
    room = max(SCALARS, sum(line.elements * calls for line, calls in ours.left.items() if line.kind == "all-reduce" and few(line)))
    laid_end_to_end = lambda line: line.elements == 1 or line.elements <= room and line.phase not in ("reduce", "backward")
    for pool, fits in ((ours, few), (theirs, laid_end_to_end)):
        for line in pool.lines():
            if line.kind == "all-reduce" and fits(line):
                one = replace(line, calls=pool.left[line])
                found.append(Pair(one, None, ("scalars",)) if pool is ours else Pair(None, one, ("scalars",)))
                pool.left[line] = 0
    return found
