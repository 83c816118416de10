"""A line of the communication contract: one kind of collective, among whom, of what, how often, when and for whom. No JAX.

Costs are those of the ring algorithms, in bytes sent per device: all-gather (N-1)/N of the full result, reduce-scatter (N-1)/N of
the full operand, all-reduce both, all-to-all (N-1)/N of the local operand, permute the operand. `limit` leaves the (N-1)/N out.
"""
from collections import defaultdict
from dataclasses import dataclass

from jaxpara.config import BYTES

FACTOR = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 1, "permute": 1}

PHASES = ("forward", "recompute", "backward", "reduce", "optimizer", "loss")

WIDTH = {**BYTES, "float8": 1, "complex64": 8, "complex128": 16, "bool": 1,
         **{f"{sign}int{8 * width}": width for sign in ("", "u") for width in (1, 2, 4, 8)}}
"""Bytes per element of every dtype that a line may have."""


@dataclass(frozen=True)
class Line:
    kind: str               # of FACTOR
    axes: tuple[str, ...]   # the group spans these axes, in mesh order
    dtype: str
    elements: int           # per call: of the full result of an all-gather, the full operand of a reduce-scatter, else of the operand
    calls: int              # per step
    phase: str              # of PHASES
    owner: str              # a parameter ("layers.mlp.up") or a block ("attention", "mlp", "embedding", "head", "loss")
    n: int                  # devices in the group; of a permute, in the ring
    what: str = ""          # in words
    when: str = ""          # how often, in words: "layer" | "block" | "micro-batch" | "step"

    @property
    def axis(self):
        return "·".join(self.axes)

    @property
    def width(self):
        """Bytes per element."""
        return WIDTH[self.dtype]

    @property
    def limit(self):
        """Bytes of all calls of a step for a large group."""
        return FACTOR[self.kind] * self.calls * self.elements * self.width

    @property
    def wire(self):
        """Bytes sent per device and step, exactly; a whole number wherever the group divides the data."""
        return whole(self.limit if self.kind == "permute" else self.limit * (self.n - 1) / self.n)


def whole(number):
    """As an int if it is one."""
    return int(number) if number == int(number) else number


def total(lines):
    """{axis: (wire, limit)} summed."""
    sums = defaultdict(lambda: [0, 0])
    for line in lines:
        sums[line.axis][0] += line.wire
        sums[line.axis][1] += line.limit
    return {axis: tuple(pair) for axis, pair in sums.items()}
