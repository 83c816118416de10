"""Collectives of a compiled program -> contract lines, like with like. No JAX."""
import re
from dataclasses import dataclass, replace

from jaxpara.hlo.attribute import axes_of, coordinates, owner_of, phase_of
from jaxpara.hlo.parse import Collective
from jaxpara.pipeline.placing import divergent, stack, ticks
from jaxpara.plan.lines import Line
from jaxpara.plan.passes import taken

SLICED = "all-reduce + slice"

WORDS = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint"}


def dtype_of(name):
    """XLA's f32, bf16, s32, pred … as numpy's names."""
    if name.startswith("f8"):
        return "float8"
    found = re.fullmatch(r"(f|bf|s|u)(\d+)", name)
    return WORDS[found[1]] + found[2] if found else {"pred": "bool", "c64": "complex64", "c128": "complex128"}.get(name, name)


@dataclass(frozen=True)
class Found:
    """A compiled contract line, and the collectives that it stands for."""
    line: Line
    parts: tuple[Collective, ...]

    @property
    def known(self):
        """Whether the mesh explains the groups."""
        return bool(self.line.axes)


def found(collectives, run, platform="cpu"):
    """A `Found` for every different line; groups of one, which send nothing, are left out. Where no axes explain the groups, axes is ().

    An all-reduce of which every device uses only its piece is a reduce-scatter on CPU, where nothing is on a wire; elsewhere it sends what
    all-reduces send.
    """
    sizes, lines = run.mesh.sizes, {}
    for one in collectives:
        if one.n == 1:
            continue
        one = by_table(one, run)
        axes = axes_of(one.groups, one.kind, sizes) or ()
        phase, owner = phase_of(one.op_name), owner_of(one.op_name)
        kind = "all-reduce" if one.disguise == SLICED and platform != "cpu" else one.kind
        key = kind, axes, dtype_of(one.dtype), one.elements, phase, owner, one.n, one.disguise, where(one.trips, run, phase)
        lines.setdefault(key, []).append(one)
    for (kind, axes, dtype, elements, phase, owner, n, disguise, place), parts in lines.items():
        calls = sum(part.calls for part in parts)
        yield Found(Line(kind, axes, dtype, elements, calls, phase, owner, n, disguise or "", place), tuple(parts))


def by_table(one, run):
    """A collective in a branch of a pipeline's ticks, with the calls that its schedule makes instead of one in every tick."""
    if not one.branch or not divergent(run):
        return one
    distance = None
    if one.branch == "send":
        source, target = (coordinates(device, run.mesh.sizes)["pp"] for device in one.groups[0])
        distance = (target - source) % run.mesh.pp
    return replace(one, calls=one.calls // ticks(run) * taken(run, one.branch, distance))


def where(trips, run, phase=""):
    """In which loops, in words. trips: passes of each loop around, outermost first; the loss has chunks instead of layers."""
    rest, words, layers = [trip for trip in trips if trip > 1], [], stack(run).length
    if run.mesh.pp > 1 and rest[:1] == [ticks(run)]:
        words.append("tick")
        rest = rest[1:]
    elif run.mesh.pp == 1 and run.train.microbatches > 1 and rest[:1] == [run.train.microbatches]:
        words.append("micro-batch")
        rest = rest[1:]
    if rest and phase == "loss":
        words.append("chunk")
        rest = rest[1:]
    elif rest[:1] == [layers]:
        words.append("layer")
        rest = rest[1:]
    words += [f"loop of {trip}" for trip in rest]
    return " · ".join(words) or "step"
