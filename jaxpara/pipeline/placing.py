"""A run's pipeline: its schedule, and which layer each row of the stacked parameters holds. No JAX."""
from dataclasses import dataclass
from functools import cache

from jaxpara.errors import ConfigError
from jaxpara.pipeline.builders import KINDS, build, wrong
from jaxpara.pipeline.layers import split_layers
from jaxpara.pipeline.table import from_csv, text_of

SETTINGS = ("mesh.pp", "train.microbatches", "parallel.chunks", "parallel.schedule")
"""What a run calls stages, micro-batches, chunks and the kind of schedule."""

LAYER_SETTINGS = ("model.layers", "mesh.pp", "parallel.chunks", "parallel.layers_per_stage")
"""What a run calls layers, stages, chunks and the layers of each."""


def divergent(run):
    """Whether stages do different ops at one time, by a table; the circular scan has all of them do the same."""
    return run.mesh.pp > 1 and (run.parallel.schedule != "circular" or run.parallel.schedule_file is not None)


def ticks(run):
    """Passes of the program's loop over ticks: of the whole table, or, as the circular scan's backward pass mirrors it, up to the last F."""
    table = schedule(run)
    return table.ticks if divergent(run) else table.forward_ticks


def schedule(run):
    """The `Schedule` of a run with mesh.pp > 1. ConfigError with everything wrong with it if there is none."""
    file = run.parallel.schedule_file
    if file is None:
        return _built(run.parallel.schedule, run.mesh.pp, run.train.microbatches, run.parallel.chunks)
    try:
        table = _parsed(text_of(file), str(file))       # by its text, since a file may be edited, or another lie in another directory
    except ConfigError as error:
        raise ConfigError(*(f"parallel.schedule_file = {violation}" for violation in error.violations)) from None
    if wrong_numbers := list(_misfits(table, run)):
        raise ConfigError(*wrong_numbers)
    return table


@cache
def _built(kind, stages, microbatches, chunks):
    return build(kind, stages, microbatches, chunks, SETTINGS)


_parsed = cache(from_csv)


def _misfits(table, run):
    """Yield where a table from a file and the run's numbers differ."""
    p, m, v, file = run.mesh.pp, run.train.microbatches, run.parallel.chunks, f"parallel.schedule_file = {run.parallel.schedule_file}"
    if p != table.stages:
        fits = f"{table.stages}, or " * (table.stages > 1)
        yield f"mesh.pp = {p} does not fit {file}, which has {counted(table.stages, 'stage')}. Legal: {fits}a table of {p} stages."
    if m != table.microbatches:
        yield (f"train.microbatches = {m} does not fit {file}, which has {counted(table.microbatches, 'micro-batch', 'es')}. "
               f"Legal: {table.microbatches}, or a table of {m}.")
    if v not in (None, table.chunks):
        yield (f"parallel.chunks = {v} does not fit {file}, which has {counted(table.chunks, 'chunk')} per stage. "
               f"Legal: {table.chunks}, or none: the table says it.")


def counted(number, word, plural="s"):
    """1 stage, 2 stages."""
    return f"{number} {word}{plural * (number != 1)}"


def faults(run):
    """Yield why a run with mesh.pp > 1 cannot have its schedule, or else its layers."""
    given, layers = run.parallel.layers_per_stage, run.model.layers
    try:
        schedule(run)
    except ConfigError as error:
        yield from error.violations
        if given is not None and sum(given) != layers:      # wrong whatever the schedule
            yield (f"parallel.layers_per_stage = {','.join(map(str, given))} must add up to model.layers = {layers} (adds up to {sum(given)}). "
                   f"Legal: numbers that add up to {layers}.")
        return
    try:
        stack(run)
    except ConfigError as error:
        yield from error.violations


@dataclass(frozen=True)
class Stack:
    """How layers lie in dim 0 of a stacked parameter: stage by stage, on a stage chunk by chunk in model order, each chunk `length` rows.

    rows: the layer in each row; -1: padding of a chunk that has fewer. chunks: v, per stage.
    """
    rows: tuple[int, ...]
    chunks: int
    length: int

    @property
    def padded(self):
        return -1 in self.rows

    @property
    def row_of(self):
        """The row of each layer, in model order."""
        return tuple(sorted((row for row, layer in enumerate(self.rows) if layer >= 0), key=self.rows.__getitem__))


def stack(run):
    """The `Stack` of a run; without a pipeline the layers in order."""
    if run.mesh.pp == 1:
        return Stack(tuple(range(run.model.layers)), 1, run.model.layers)
    given = run.parallel.layers_per_stage
    return _stack(schedule(run), run.model.layers, None if given is None else tuple(given))


def only(whole, layers):
    """The `Stack` of a parameter that these layers of `whole` have. Each chunk must have as many of them."""
    if not layers or set(whole.rows) - {-1} <= set(layers):
        return whole
    cut = range(0, len(whole.rows), whole.length)
    chunks = [[layer for layer in whole.rows[start:start + whole.length] if layer in layers] for start in cut]
    return Stack(tuple(layer for chunk in chunks for layer in chunk), whole.chunks, len(chunks[0]))


@cache
def _stack(table, layers, given):
    fits = lambda p, v: p > 1 and table.kind in KINDS and not any(wrong(table.kind, p, table.microbatches, v))
    split = split_layers(layers, table.stages, table.chunks, placement=table.placement, given=given, names=LAYER_SETTINGS, fits=fits)
    length = max(map(len, split.values()))
    rows = []
    for stage in range(table.stages):
        for chunk in table.held(stage):
            held = split[stage, chunk]
            rows += [*held, *[-1] * (length - len(held))]
    return Stack(tuple(rows), table.chunks, length)
