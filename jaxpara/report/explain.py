"""Every parameter of a run: where it lies and why, from the config alone. No JAX."""
import textwrap

from jaxpara.config import BYTES
from jaxpara.errors import ConfigError
from jaxpara.plan import model_state
from jaxpara.plan.memory import OPTIMIZER_TENSORS
from jaxpara.report.units import both, exact
from jaxpara.rules import local_shape
from jaxpara.zero import placements, why

WIDTH = 98
"""Columns of the text; long reasons are wrapped."""


def explain(run):
    """Text: for every parameter its labels, its three specs with shape and bytes per device, and the reason; then totals, and the
    parameters that stay replicated although a ZeRO stage asks for them to be sharded.

    Raises ConfigError while an axis of the mesh is "auto".
    """
    if run.mesh.auto:
        raise ConfigError(f"mesh.{run.mesh.auto} = auto: where parameters lie depends on the number of devices. Give the axis a number, "
                          "or plan for a target such as cpu:8.")
    table = placements(run)
    lines = [f"{run.name} on {run.mesh.text}: {len(table)} parameters. dim/axisN: the dim is split N ways over the axis.", ""]
    for placement in table.values():
        lines += [*describe(placement, run), ""]
    lines += ["Bytes per device"]
    lines += [f"  {part:<11} {both(amount)}" for part, amount in model_state(run).items()]
    return "\n".join(lines + replicated(table, run)) + "\n"


def describe(placement, run):
    """The lines about one parameter."""
    parameter, precision = placement.parameter, run.precision
    copies = OPTIMIZER_TENSORS[run.optim.name] + bool(precision.master)
    widths = {"storage": BYTES[precision.params], "gradient": BYTES[precision.gradient(run.train.microbatches)],
              "optimizer": BYTES[precision.optimizer] * copies}
    yield f"{parameter.name}  {times(parameter.shape)}  [{', '.join(parameter.labels)}]"
    for kind, width in widths.items():
        spec = getattr(placement, kind)
        tensors = f" ({copies} tensors)" if kind == "optimizer" and copies != 1 else ""
        piece = times(local_shape(placement.shape, spec, run.mesh))
        yield f"  {kind:<10} {spec_text(placement, spec):<44} {piece:<20} {exact(placement.elements(spec) * width):>14}{tensors}"
    yield textwrap.fill(why(placement, run), WIDTH, initial_indent="  because    ", subsequent_indent=" " * 13)


def replicated(table, run):
    """Lines about the parameters that a ZeRO stage could not shard; none if there are none."""
    left = [placement for placement in table.values() if placement.dropped]
    if not left:
        return []
    width, amounts = BYTES[run.precision.params], [(p, p.elements(p.storage) * BYTES[run.precision.params]) for p in left]
    lines = ["", f"Replicated although a ZeRO stage asks for shards ({exact(sum(amount for _, amount in amounts))} of {width}-byte parameters)"]
    return lines + [f"  {p.name}: over {', '.join(f'{axis} (ZeRO-{getattr(run.parallel.zero, axis)})' for axis in p.dropped)}, {exact(amount)}"
                    for p, amount in amounts]


def spec_text(placement, spec):
    """vocab/tp2, width/fsdp2: labels with the axes that split them."""
    sizes = placement.mesh.sizes
    dims = ["·".join(f"{axis}{sizes[axis]}" for axis in dim) for dim in spec]
    return ", ".join(f"{label}/{axes}" if axes else label for label, axes in zip(placement.parameter.labels, dims))


def times(shape):
    """4 × 128."""
    return " × ".join(str(size) for size in shape)
