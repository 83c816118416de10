"""Which buffers of a compiled pipeline wait for another tick. No JAX."""
import re

from jaxpara.pipeline.lockstep import tables
from jaxpara.pipeline.placing import divergent, schedule, stack
from jaxpara.plan.memory import Sizes, shape_of_border, shapes_of_pair
from jaxpara.plan.stages import stacked_ticks, ticks

OF_AN_OP = re.compile(r"pipeline\.(forward|backward|weight|begin|loss|end)|checkpoint|while/body/.*while/body")
"""In the name of what an op of a tick, or a layer, makes for itself."""


def core(dims):
    """A shape whatever its order and its dims of 1."""
    return tuple(sorted(dim for dim in dims if dim != 1))


class Waiting:
    """What lies from tick to tick is made outside their loop and has the number of its slots in front; what one tick hands on is made inside, but not
    by an op's own code."""

    def __init__(self, run):
        table, size = tables(schedule(run)) if divergent(run) else None, Sizes(run, "cpu")
        self.length, self.ticks = stack(run).length, stacked_ticks(run)
        self.border, self.pair = core(shape_of_border(run)), {core(shape) for shape in shapes_of_pair(run)}
        self.rotation = core((size.rows, size.length, run.model.head_dim // 2))
        self.borders = {table.slots, table.gradients} if table else {ticks(run), run.train.microbatches}
        self.pairs = table.pairs if table else 0

    def kind(self, buffer):
        """"slots" or "pairs", as in `plan.temporaries`; None for what is neither."""
        dims, between = buffer.dims, buffer.loops == 1 and not OF_AN_OP.search(buffer.op_name)
        if self.pairs and self.is_pair(buffer, between):
            return "pairs"
        slots = buffer.loops == 0 and dims and dims[0] in self.borders and core(dims[1:]) == self.border
        return "slots" if slots or between and core(dims) == self.border else None

    def is_pair(self, buffer, between):
        """Whether it is all slots of pairs, one of them, or what a tick's op gives or W takes."""
        dims, one = buffer.dims, buffer.opcode == "conditional" and between or buffer.loops == 1 and "pipeline.weight" in buffer.op_name
        if dims[:2] in ((self.pairs, self.length), (1, self.length)) and core(dims[2:]) in self.pair:
            return True
        return one and dims[:1] == (self.length,) and core(dims[1:]) in self.pair

    def saved(self, buffer):
        """Whether it holds residuals of a chunk's layers: carried by the loop over them, or by the scan over ticks, of all ticks."""
        if self.ticks > 1:
            stacked = buffer.dims[:2] in ((self.ticks, self.length), (self.ticks, 1))
            return buffer.loops == 0 and (stacked or buffer.dims[:1] == (self.ticks,) and core(buffer.dims[1:]) == self.rotation)
        return buffer.loops == 1 and buffer.carried and len(buffer.dims) > 2 and buffer.dims[0] == self.length
