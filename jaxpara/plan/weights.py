"""What the ZeRO table sends: weights, gradients and updated parameters, one line per parameter. No JAX."""
from math import prod

from jaxpara.config import BYTES
from jaxpara.pipeline.placing import divergent, schedule
from jaxpara.plan.lines import Line
from jaxpara.plan.passes import passes
from jaxpara.zero import scatter_steps


def size(run, axes):
    """Devices in a group over `axes`."""
    return prod(getattr(run.mesh, axis) for axis in axes)


def wide(run):
    """Dtype of an accumulator: float32, or float64 in float64 runs."""
    return "float64" if BYTES[run.precision.compute] == 8 else "float32"


def gradient_dtype(run, p):
    """Dtype in which a parameter's gradient is reduced: never narrower than the parameter."""
    dtype = run.precision.gradient(run.train.microbatches)
    return "float32" if p.parameter.wide and BYTES[dtype] < 4 else dtype


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
    return (run.parallel.remat != "none" or passes(run).merged) and any(part in parameter.name for part in recomputed)


def zero3(run, table):
    """Per layer: weights gathered in compute dtype, forward and backward; gradients scattered in gradient dtype.

    What lies outside the layers is gathered in forward only: the loss makes its gradients in its forward pass. A tied embedding is used
    twice; its two gathers are equal, so that compilers keep one of them, its two gradients are scattered each.
    """
    count = passes(run)
    for p in table.values():
        compute, gradient = run.precision.computed(p.parameter), gradient_dtype(run, p)
        axes, layered = p.axes(3), p.parameter.stacked
        if not axes:
            continue
        if run.parallel.gather_once:
            yield from zero3_once(run, p)
            continue
        when = "layer" if layered else "micro-batch"
        full = p.elements(p.storage) * size(run, axes) // (p.held if layered else 1) // (run.model.kv_heads if p.kv_slice is not None else 1)
        forward, backward = uses(run, p)

        def line(what, kind, dtype, calls, phase, n=size(run, axes), elements=full):
            return Line(kind, axes, dtype, elements, calls, phase, p.name, n, what, when)

        yield line("ZeRO-3 weights, forward", "all-gather", compute, forward, "forward")
        if layered and (not count.merged or gathered_again(p.parameter, run)):
            yield line("ZeRO-3 weights, forward again", "all-gather", compute, count.again * p.held // count.held, "recompute")
        if gathered_again(p.parameter, run) and not count.merged:
            yield line("ZeRO-3 weights, backward", "all-gather", compute, backward, "recompute")
        for n, elements in scattered(run, axes, full):
            yield line("ZeRO-3 gradients", "reduce-scatter", gradient, backward, "backward", n, elements)


def uses(run, p):
    """(times that a parameter is gathered in forward, times that it is used backward) in a step."""
    count, tied = passes(run), run.model.tied and p.name == "embedding.tokens"
    if p.parameter.stacked:
        return count.forward * p.held // count.held, count.backward * p.held // count.held
    if tied:
        # the two gathers of one micro-batch are equal, and compilers keep one; in a table they stand in different ticks
        return count.begins + count.losses * divergent(run), count.begins + count.losses
    return (count.begins,) * 2 if p.name.startswith("embedding.") else (count.losses,) * 2


def zero3_once(run, p):
    """With `gather_once`: all rows in one gather before the pipeline's first tick, their gradients in one scatter after its last."""
    axes, full = p.axes(3), p.elements(p.base)
    yield Line("all-gather", axes, run.precision.computed(p.parameter), full, 1, "forward", p.name, size(run, axes), "ZeRO-3 weights, once", "step")
    for n, elements in scattered(run, axes, full):
        yield Line("reduce-scatter", axes, gradient_dtype(run, p), elements, 1, "backward", p.name, n,
                   "ZeRO-3 gradients, once", "step")


def reductions(run, table):
    """Gradients in gradient dtype: stage 2 in every micro-batch, stages 1 and 0 once a step; what tp ranks hold in copies, once a step."""
    def line(axes, what, kind, when, calls, elements, owner, n=None):
        return Line(kind, axes, dtype, elements, calls, "reduce", owner, n or size(run, axes), what, when)

    for p in table.values():
        dtype = gradient_dtype(run, p)
        calls, parts = micro_reductions(run, p)
        for stage, when, calls, whole in ((2, "micro-batch", calls, p.elements(p.storage) // parts), (1, "step", 1, p.elements(p.gradient))):
            for n, elements in scattered(run, p.axes(stage), whole) if p.axes(stage) else ():
                yield line(p.axes(stage), f"ZeRO-{stage} gradients", "reduce-scatter", when, calls, elements, p.name, n)
        rest = p.axes(0) + ("tp",) * p.tp_sum
        if rest:
            what = "gradients of copies over tp" if rest == ("tp",) else "ZeRO-0 gradients"
            yield line(rest, what, "all-reduce", "step", 1, p.elements(p.optimizer), p.name)


def micro_reductions(run, p):
    """(calls, parts of the parameter that each reduces its gradient of): of ZeRO-2, micro-batch by micro-batch, or tick by tick of a pipeline."""
    count, m = passes(run), run.train.microbatches
    if run.mesh.pp == 1:
        return m, 1
    if run.parallel.gather_once and p.axes(3):
        return 1, 1
    if p.parameter.stacked:
        return count.chunks, schedule(run).chunks
    # the circular scan differentiates its ends once; a table sums what each micro-batch, and each use of a tied embedding, gives
    return (uses(run, p)[1] if divergent(run) else 1), 1


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
            yield Line("all-gather", axes, run.precision.stored(p.parameter), p.elements(p.storage), 1, "optimizer", p.name, size(run, axes),
                       "updated parameters", "step")
