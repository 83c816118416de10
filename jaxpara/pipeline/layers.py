"""Which layers each chunk holds. No JAX."""
from itertools import accumulate

from jaxpara.errors import ConfigError
from jaxpara.pipeline.schedule import loop

NAMES = ("layers", "stages", "chunks", "layers_per_stage")


def split_layers(layers, stages, chunks=1, *, placement=None, costs=None, ends=(0.0, 0.0), given=None, names=NAMES):
    """{(stage, chunk): range of layers}, in model order; chunks are numbered in model order over all stages.

    chunks: per stage. placement: the stage of each chunk (`Schedule.placement`); None = a loop. costs: one per layer, any unit; None = all
    alike. ends: what embedding and head cost, in layers of average cost; they count for the stages of the first and the last chunk.
    given: the user's numbers of layers, one per chunk in model order, or one per stage, spread over its chunks.
    names: what the caller calls layers, stages, chunks and given.

    Even if it divides and nothing says otherwise. Else the slowest stage is as fast as it can be, ties to the middle of the pipeline; for
    unequal costs and several chunks per stage, the slowest chunk. ConfigError if a chunk would have no layer.
    """
    placement = loop(stages, chunks) if placement is None else placement
    _possible(layers, stages, chunks, costs, names)
    if given is not None:
        counts = _as_given(layers, tuple(given), placement, names)
    elif costs is None or len(set(costs)) == 1:
        counts = _water(layers, placement, ends)
    else:
        counts = _partition(costs, len(placement), [end * sum(costs) / layers for end in ends])
    edges = [0, *accumulate(counts)]
    return {(stage, chunk): range(edges[chunk], edges[chunk + 1]) for chunk, stage in enumerate(placement)}


def _possible(layers, stages, chunks, costs, names):
    layers_name, stages_name, chunks_name, _ = names
    if min(stages, chunks) < 1:
        raise ConfigError(*(f"{name} = {value} must be greater than 0. Legal: 1 or more."
                            for name, value in ((stages_name, stages), (chunks_name, chunks)) if value < 1))
    if layers < stages * chunks:
        pairs = [(p, layers // p) for p in range(min(stages, layers), 0, -1)]
        pairs = [(p, min(v, chunks)) for p, v in pairs]
        legal = ", ".join(f"{p} · {v}" for p, v in dict.fromkeys(pairs[:3]))
        raise ConfigError(f"{layers_name} = {layers} are fewer than {stages_name} · {chunks_name} = {stages} · {chunks} = {stages * chunks} chunks: "
                          f"each needs a layer. Legal: {layers_name} {stages * chunks} or more; for {layers} layers the nearest "
                          f"{stages_name} · {chunks_name} are {legal or 'none'}.")
    if costs is not None and (len(costs) != layers or min(costs) < 0):
        raise ConfigError(f"costs has {len(costs)} numbers for {layers_name} = {layers}: one for each layer, none negative.")


def _as_given(layers, given, placement, names):
    stages, total = max(placement) + 1, len(placement)
    layers_name, stages_name, _, name = names
    if len(given) not in (stages, total):
        either = f"{stages}" if stages == total else f"{stages} (one per stage) or {total} (one per chunk, in model order)"
        raise ConfigError(f"{name} = {','.join(map(str, given))} has {len(given)} numbers for {stages_name} = {stages}. Legal: {either}.")
    least = total // stages if len(given) == stages else 1
    if sum(given) != layers or min(given) < least:
        raise ConfigError(f"{name} = {','.join(map(str, given))} must add up to {layers_name} = {layers} (adds up to {sum(given)}) with at least "
                          f"{least} each. Such as: {','.join(map(str, _sizes(layers, len(given))))}.")
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
