"""What the ZeRO table sends: weights, gradients and updated parameters, one line per parameter. No JAX."""
from math import prod

from jaxpara.config import BYTES
from jaxpara.plan.lines import Line
from jaxpara.zero import scatter_steps


def size(run, axes):
    """Devices in a group over `axes`."""
    return prod(getattr(run.mesh, axis) for axis in axes)


def scattered(run, axes, elements):
    """Yield (devices, elements) of each step of a reduce-scatter of `elements`."""
    for n in scatter_steps(size(run, axes), axes, run.parallel.scatter_inner):
        yield n, elements
        elements //= n


def gathered_again(parameter, run):
    """Whether the backward pass gathers a layer's weight again. Biases feed nothing that backward needs, unless what follows is recomputed."""
    if not parameter.stacked:
        return False
    if "bias" not in parameter.name:
        return True
    recomputed = ("norm1", "norm2", "query", "key", "value", "output", "up")
    return run.parallel.remat != "none" and any(part in parameter.name for part in recomputed)


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

        def line(what, kind, dtype, calls, phase, n=size(run, axes), elements=full):
            return Line(kind, axes, dtype, elements, calls, phase, p.name, n, what, when)

        yield line("ZeRO-3 weights, forward", "all-gather", compute, m * layers, "forward")
        if gathered_again(p.parameter, run):
            yield line("ZeRO-3 weights, backward", "all-gather", compute, m * layers, "recompute")
        for n, elements in scattered(run, axes, full):
            yield line("ZeRO-3 gradients", "reduce-scatter", gradient, m * layers * uses, "backward", n, elements)


def reductions(run, table):
    """Gradients in gradient dtype: stage 2 in every micro-batch, stages 1 and 0 once a step; what tp ranks hold in copies, once a step."""
    m, dtype = run.train.microbatches, run.precision.gradient(run.train.microbatches)

    def line(axes, what, kind, when, calls, elements, owner, n=None):
        return Line(kind, axes, dtype, elements, calls, "reduce", owner, n or size(run, axes), what, when)

    for p in table.values():
        for stage, when, calls, whole in ((2, "micro-batch", m, p.storage), (1, "step", 1, p.gradient)):
            for n, elements in scattered(run, p.axes(stage), p.elements(whole)) if p.axes(stage) else ():
                yield line(p.axes(stage), f"ZeRO-{stage} gradients", "reduce-scatter", when, calls, elements, p.name, n)
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
