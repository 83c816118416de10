"""What the ZeRO table sends: weights, gradients and updated parameters, one line per parameter. No JAX."""
from math import prod

from jaxpara.config import BYTES
from jaxpara.plan.lines import Line


def size(run, axes):
    """Devices in a group over `axes`."""
    return prod(getattr(run.mesh, axis) for axis in axes)


def gathered_again(parameter, run):
    """Whether the backward pass gathers a layer's weight again. Biases feed nothing that backward needs, unless what follows is recomputed."""
    if not parameter.stacked:
        return False
    if "bias" not in parameter.name:
        return True
    recomputed = {"none": (), "full": ("norm1", "norm2", "query", "key", "value", "output", "up"),
                  "selective": ("norm1", "norm2", "query", "key", "value", "output", "up")}[run.parallel.remat]
    return any(part in parameter.name for part in recomputed)


def zero3(run, table):
    """Per layer: weights gathered in compute dtype, forward and backward; gradients scattered in gradient dtype.

    What lies outside the layers is gathered in forward only: the loss makes its gradients in its forward pass. A tied embedding is used
    twice; its two gathers are equal, so that compilers keep one of them, its two gradients are scattered each.
    """
    m, compute, gradient = run.train.microbatches, run.precision.compute, run.precision.gradient(run.train.microbatches)
    for p in table.values():
        axes, layered = p.axes(3), p.parameter.stacked
        if not axes:
            continue
        layers, when = (run.model.layers, "layer") if layered else (1, "micro-batch")
        full = p.elements(p.storage) * size(run, axes) // layers // (run.model.kv_heads if p.kv_slice is not None else 1)
        uses = 2 if run.model.tied and p.name == "embedding.tokens" else 1

        def line(what, kind, dtype, calls, phase):
            return Line(kind, axes, dtype, full, calls, phase, p.name, size(run, axes), what, when)

        yield line("ZeRO-3 weights, forward", "all-gather", compute, m * layers, "forward")
        if gathered_again(p.parameter, run):
            yield line("ZeRO-3 weights, backward", "all-gather", compute, m * layers, "recompute")
        yield line("ZeRO-3 gradients", "reduce-scatter", gradient, m * layers * uses, "backward")


def reductions(run, table):
    """Gradients in gradient dtype: stage 2 in every micro-batch, stages 1 and 0 once a step; what tp ranks hold in copies, once a step."""
    m, dtype = run.train.microbatches, run.precision.gradient(run.train.microbatches)

    def line(axes, what, kind, when, calls, elements, owner):
        return Line(kind, axes, dtype, elements, calls, "reduce", owner, size(run, axes), what, when)

    for p in table.values():
        if p.axes(2):
            yield line(p.axes(2), "ZeRO-2 gradients", "reduce-scatter", "micro-batch", m, p.elements(p.storage), p.name)
        if p.axes(1):
            yield line(p.axes(1), "ZeRO-1 gradients", "reduce-scatter", "step", 1, p.elements(p.gradient), p.name)
        rest = p.axes(0) + ("tp",) * p.tp_sum
        if rest:
            what = "gradients of copies over tp" if rest == ("tp",) else "ZeRO-0 gradients"
            yield line(rest, what, "all-reduce", "step", 1, p.elements(p.optimizer), p.name)


def norm(run, table):
    """One number per parameter and sharded dim: its sum of squares, over what the optimizer shards that dim over."""
    dtype = "float64" if BYTES[run.precision.optimizer] == 8 else "float32"
    for p in table.values():
        for axes in p.optimizer:
            axes = tuple(axis for axis in p.mesh.sizes if axis in axes)
            if axes:
                yield Line("all-reduce", axes, dtype, 1, 1, "optimizer", p.name, size(run, axes), "gradient norm", "step")


def updates(run, table):
    """After the update, the parameters of stages 1 and 2 in parameter dtype: one all-gather a step."""
    for p in table.values():
        axes = tuple(axis for axis in p.mesh.sizes if p.stages.get(axis) in (1, 2))
        if axes:
            yield Line("all-gather", axes, run.precision.params, p.elements(p.storage), 1, "optimizer", p.name, size(run, axes),
                       "updated parameters", "step")
