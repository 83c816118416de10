"""A run's pipeline: its schedule, and which layer each row of the stacked parameters holds. No JAX."""
from dataclasses import dataclass
from functools import cache

from jaxpara.pipeline.builders import build
from jaxpara.pipeline.layers import split_layers
from jaxpara.pipeline.table import read

SETTINGS = ("mesh.pp", "train.microbatches", "parallel.chunks")
"""What a run calls stages, micro-batches and chunks."""

LAYER_SETTINGS = ("model.layers", "mesh.pp", "parallel.chunks", "parallel.layers_per_stage")
"""What a run calls layers, stages, chunks and the layers of each."""


def divergent(run):
    """Whether stages do different ops at one time, by a table; the circular scan has all of them do the same."""
    return run.mesh.pp > 1 and (run.parallel.schedule != "circular" or run.parallel.schedule_file is not None)


def schedule(run):
    """The `Schedule` of a run with mesh.pp > 1. Raises ConfigError if there is none."""
    return _schedule(run.mesh.pp, run.train.microbatches, run.parallel.schedule, run.parallel.chunks, run.parallel.schedule_file)


@cache
def _schedule(stages, microbatches, kind, chunks, file):
    return read(file) if file else build(kind, stages, microbatches, chunks, SETTINGS)


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
    return _stack(schedule(run), run.model.layers, run.parallel.layers_per_stage)


@cache
def _stack(table, layers, given):
    split = split_layers(layers, table.stages, table.chunks, placement=table.placement, given=given, names=LAYER_SETTINGS)
    length = max(map(len, split.values()))
    rows = []
    for stage in range(table.stages):
        for chunk in table.held(stage):
            held = split[stage, chunk]
            rows += [*held, *[-1] * (length - len(held))]
    return Stack(tuple(rows), table.chunks, length)
