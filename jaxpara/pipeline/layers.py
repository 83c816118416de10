"""Which layers each chunk holds. No JAX."""
from itertools import accumulate

from jaxpara.errors import ConfigError
from jaxpara.pipeline.schedule import loop

NAMES = ("layers", "stages", "chunks", "layers_per_stage")


def split_layers(layers, stages, chunks=1, *, placement=None, costs=None, ends=(0.0, 0.0), given=None, names=NAMES, fits=None):
    """{(stage, chunk): range of layers}, in model order; chunks are numbered in model order over all stages.

    chunks: per stage. placement: the stage of each chunk (`Schedule.placement`); None = a loop. costs: one per layer, any unit; None = all
    alike. ends: what embedding and head cost, in layers of average cost; they count for the stages of the first and the last chunk.
    given: the user's numbers of layers, one per chunk in model order, or one per stage, spread over its chunks.
    names: what the caller calls layers, stages, chunks and given. fits: whether (stages, chunks) may be proposed instead, where there are too
    few layers; None = all may.

    Even if it divides and nothing says otherwise. Else the slowest stage is as fast as it can be, ties to the middle of the pipeline; for
    unequal costs and several chunks per stage, the slowest chunk. ConfigError with everything wrong, such as a chunk without a layer.
    """
    placement = loop(stages, chunks) if placement is None else placement
    faults = list(_impossible(layers, stages, chunks, costs, names, fits))
    if given is not None and min(stages, chunks) > 0:
        faults += _misgiven(layers, given, placement, names)
    if faults:
        raise ConfigError(*faults)
    if given is not None:
        counts = _as_given(tuple(given), placement)
    elif costs is None or len(set(costs)) == 1:
        counts = _water(layers, placement, ends)
    else:
        counts = _partition(costs, len(placement), [end * sum(costs) / layers for end in ends])
    edges = [0, *accumulate(counts)]
    return {(stage, chunk): range(edges[chunk], edges[chunk + 1]) for chunk, stage in enumerate(placement)}


def _impossible(layers, stages, chunks, costs, names, fits):
    layers_name, stages_name, chunks_name, _ = names
    named = (stages_name, stages), (chunks_name, chunks)
    low = [f"{name} = {value} must be greater than 0. Legal: 1 or more." for name, value in named if value < 1]
    yield from low
    if not low and layers < stages * chunks:
        pairs = ", ".join(f"{p} · {v}" for p, v in _smaller(layers, stages, chunks, fits))
        nearest = f"; for {layers} layers the nearest {stages_name} · {chunks_name} are {pairs}" if pairs else ""
        yield (f"{layers_name} = {layers} are fewer than {stages_name} · {chunks_name} = {stages} · {chunks} = {stages * chunks} chunks: "
               f"each needs a layer. Legal: {layers_name} {stages * chunks} or more{nearest}.")
    if costs is not None and (len(costs) != layers or min(costs) < 0):
        yield f"costs has {len(costs)} numbers for {layers_name} = {layers}: one for each layer, none negative."


def _smaller(layers, stages, chunks, fits):
    """Up to three (stages, chunks) with a layer for every chunk, the most stages first."""
    found = []
    for p in range(min(stages, layers), 0, -1):
        found += [(p, v) for v in range(min(layers // p, chunks), 0, -1) if fits is None or fits(p, v)][:1]
        if len(found) == 3:
            break
    return found


def _misgiven(layers, given, placement, names):
    stages, total = max(placement) + 1, len(placement)
    layers_name, stages_name, _, name = names
    said = f"{name} = {','.join(map(str, given))}"
    such_as = lambda count: f" Such as: {','.join(map(str, _sizes(layers, count)))}." if layers >= total else ""
    if len(given) not in (stages, total):
        either = f"{stages}" if stages == total else f"{stages} (one per stage) or {total} (one per chunk, in model order)"
        yield f"{said} has {len(given)} number{'s' * (len(given) != 1)} for {stages_name} = {stages}. Legal: {either}.{such_as(stages)}"
        return
    least = total // stages if len(given) == stages else 1
    if sum(given) != layers or min(given) < least:
        yield f"{said} must add up to {layers_name} = {layers} (adds up to {sum(given)}) with at least {least} each.{such_as(len(given))}"


def _as_given(given, placement):
    stages, total = max(placement) + 1, len(placement)
    if len(given) == total:
        return given
    held = [[chunk for chunk in range(total) if placement[chunk] == stage] for stage in range(stages)]
    return [_sizes(given[stage], len(held[stage]))[held[stage].index(chunk)] for chunk, stage in enumerate(placement)]


def _sizes(layers, parts):
    """Even parts, the first ones larger where it does not divide."""
    return [layers // parts + (i < layers % parts) for i in range(parts)]


def _water(layers, placement, ends):
    """Equal layers: give one to each chunk, then each to the stage with the least work. That is the optimum, since only sums count."""
    counts, total = [1] * len(placement), len(placement)
    stages, work = max(placement) + 1, [0.0] * (max(placement) + 1)
    extra = [0.0] * total
    extra[0] += ends[0]
    extra[-1] += ends[1]
    for chunk, stage in enumerate(placement):
        work[stage] += 1 + extra[chunk]
    for _ in range(layers - total):
        edge = lambda stage: (stage in (placement[0], placement[-1]), -stage)      # embedding and head are there, even where not counted
        stage = min(range(stages), key=lambda stage: (work[stage], edge(stage)))
        chunk = min((chunk for chunk in range(total) if placement[chunk] == stage), key=lambda chunk: (counts[chunk] + extra[chunk], -chunk))
        counts[chunk] += 1
        work[stage] += 1
    return counts


def _partition(costs, parts, ends):
    """Sizes of `parts` runs of layers, none empty, whose largest sum is least (ends: added to the first and the last)."""
    layers, sums = len(costs), [0, *accumulate(costs)]
    weigh = lambda part, first, stop: sums[stop] - sums[first] + ends[0] * (part == 0) + ends[1] * (part == parts - 1)
    best = {(0, 0): (0.0, 0)}       # (parts, layers in them) -> (largest sum, where the last part starts)
    for part in range(parts):
        for stop in range(part + 1, layers - (parts - part - 1) + 1):
            best[part + 1, stop] = min((max(best[part, first][0], weigh(part, first, stop)), first)
                                       for first in range(part, stop) if (part, first) in best)
    counts, stop = [], layers
    for part in range(parts, 0, -1):
        first = best[part, stop][1]
        counts.insert(0, stop - first)
        stop = first
    return counts
