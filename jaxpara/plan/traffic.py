"""What one device sends in one step, from the config alone: the closed forms of ZeRO, tensor and sequence parallelism. No JAX.

Costs are those of the ring algorithms, in bytes sent per device: all-gather (N-1)/N of the full result, reduce-scatter (N-1)/N of
the full operand, all-reduce both, all-to-all (N-1)/N of the local operand, permute the operand. `limit` leaves the (N-1)/N out.
These are the manual lowering's; under the annotated one XLA chooses. Not listed: the scalars of the gradient norm.
"""
from collections import defaultdict
from dataclasses import dataclass
from math import prod

from jaxpara.checks import ring_degree, ulysses_degree
from jaxpara.config import BYTES
from jaxpara.zero import placements

FACTOR = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 1, "permute": 1}


@dataclass(frozen=True)
class Line:
    axes: tuple[str, ...]   # the group spans these axes
    what: str
    kind: str               # of FACTOR
    when: str               # how often: "layer" | "block" | "micro-batch" | "step"
    calls: int              # per step
    elements: int           # per step, all calls together: of the full result, operand, … as the module says
    width: int              # bytes per element
    n: int                  # devices in the group

    @property
    def axis(self):
        return "·".join(self.axes)

    @property
    def limit(self):
        """Bytes for a large group."""
        return FACTOR[self.kind] * self.elements * self.width

    @property
    def wire(self):
        """Bytes sent per device and step, exactly; a whole number wherever the group divides the data."""
        exact = self.limit if self.kind == "permute" else self.limit * (self.n - 1) / self.n
        return int(exact) if exact == int(exact) else exact


def traffic(run):
    """Every `Line` of a run's train step, in the order of the step; empty on one device."""
    table = placements(run)
    lines = [*zero3(run, table), *tensor(run), *sequence(run), *loss(run), *reductions(run, table), *updates(run, table)]
    return [line for line in lines if line.elements]


def total(lines):
    """{axis: (wire, limit)} summed."""
    sums = defaultdict(lambda: [0, 0])
    for line in lines:
        sums[line.axis][0] += line.wire
        sums[line.axis][1] += line.limit
    return {axis: tuple(pair) for axis, pair in sums.items()}


def group(run, axes):
    return prod(getattr(run.mesh, axis) for axis in axes)


def wide(run):
    """Bytes of an accumulator: float32, or float64 in float64 runs."""
    return max(4, BYTES[run.precision.compute])


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
    """Per layer: weights gathered in compute dtype, forward and backward; gradients scattered in gradient dtype."""
    m, compute, gradient = run.train.microbatches, BYTES[run.precision.compute], BYTES[run.precision.gradient(run.train.microbatches)]
    sums = defaultdict(lambda: [0, 0])
    for p in table.values():
        axes = p.axes(3)
        if not axes:
            continue
        parameter, layered = p.parameter, p.parameter.stacked
        full = p.elements(p.storage) * group(run, axes) // (run.model.kv_heads if p.kv_slice is not None else 1)
        uses = 2 if run.model.tied and parameter.name == "embedding.tokens" else 1
        calls = m * (run.model.layers if layered else uses)
        when = "layer" if layered else "micro-batch"
        for what, kind, width, counts in (("ZeRO-3 weights, forward", "all-gather", compute, True),
                                          ("ZeRO-3 weights, backward", "all-gather", compute, gathered_again(parameter, run)),
                                          ("ZeRO-3 gradients", "reduce-scatter", gradient, True)):
            entry = sums[axes, what, kind, when, width]
            entry[0] += calls * counts
            entry[1] += m * uses * full * counts
    for (axes, what, kind, when, width), (calls, elements) in sums.items():
        yield Line(axes, what, kind, when, calls, elements, width, group(run, axes))


def tokens_per_device(run):
    """b·S/N_sp: tokens of one micro-batch inside a block on one device."""
    return run.train.batch // run.train.microbatches // run.mesh.batch * run.train.seq // run.mesh.sp


def tensor(run):
    """Per attention or MLP block 2 all-reduces (8δb(S/N_sp)H per layer), with Megatron-SP as gathers and scatters and the backward
    re-gather of each block's input (10). Recompute repeats the attention exit; the MLP's is dead."""
    if run.mesh.tp == 1:
        return
    m, layers, width = run.train.microbatches, run.model.layers, BYTES[run.precision.compute]
    size, tp, n = tokens_per_device(run) * run.model.width, ("tp",), run.mesh.tp
    keeps_exit = run.parallel.remat == "selective" and run.parallel.remat_save == "matmuls"
    repeats = layers if run.parallel.remat != "none" and not keeps_exit else 0
    blocks = 2 * layers

    def line(what, kind, calls, when="block"):
        return Line(tp, what, kind, when, m * calls, m * calls * size, width, n)

    if run.parallel.tp_sequence:
        yield line("block inputs, forward", "all-gather", blocks)
        yield line("block outputs, forward", "reduce-scatter", blocks + repeats)
        yield line("block inputs, backward again", "all-gather", blocks)
        yield line("block output gradients", "all-gather", blocks)
        yield line("block input gradients", "reduce-scatter", blocks)
        yield line("embedding and head", "all-gather", 2, "micro-batch")
        yield line("embedding and head", "reduce-scatter", 2, "micro-batch")
    else:
        yield line("block outputs, forward", "all-reduce", blocks + repeats)
        yield line("block input gradients", "all-reduce", blocks)
        yield line("embedding and head", "all-reduce", 2, "micro-batch")
        if run.parallel.zero_r and run.parallel.remat == "full":
            yield line("ZeRO-R layer inputs", "all-gather", layers, "layer")


def sequence(run):
    """Ring (4 + 2δ_acc/δ)·δbSN_kv·d/N_tp, Ulysses 4(N_kv/N_q + 1)δbSN_q·d/(N_sp·N_tp), all-gather KV: per layer and micro-batch."""
    if run.mesh.sp == 1:
        return
    calls = run.train.microbatches * run.model.layers
    width, model, tokens = BYTES[run.precision.compute], run.model, tokens_per_device(run)
    again = run.parallel.remat == "full" or (run.parallel.remat, run.parallel.remat_save) == ("selective", "matmuls")
    inner, ring = ulysses_degree(run), ring_degree(run)
    queries = tokens * model.heads // run.mesh.tp * model.head_dim
    kv_heads = max(model.kv_heads // run.mesh.tp, 1)
    keys = tokens * (max(kv_heads, inner) if inner > 1 else kv_heads) * model.head_dim

    def line(what, kind, count, elements, n, width=width):
        return Line(("sp",), what, kind, "layer", calls * count, calls * elements, width, n)

    if run.parallel.sp_kind == "allgather":
        full = keys * run.mesh.sp
        yield line("keys and values, forward", "all-gather", 2 * (1 + again), 2 * (1 + again) * full, run.mesh.sp)
        yield line("keys and values, backward", "all-gather", 2, 2 * full, run.mesh.sp)
        yield line("key and value gradients", "reduce-scatter", 2, 2 * full, run.mesh.sp, wide(run))
        return
    if inner > 1:
        attention_kept = run.parallel.remat == "selective" and run.parallel.remat_save == "attention"
        into, out = 1 + again + attention_kept, 1 + again
        yield line("Ulysses, forward", "all-to-all", 3 * into + out, into * (queries + 2 * keys) + out * queries, inner)
        yield line("Ulysses, backward", "all-to-all", 4, 2 * queries + 2 * keys, inner)
    if ring > 1:
        hops = ring - 1
        yield line("ring K, V, forward", "permute", 2 * hops * (1 + again), 2 * hops * (1 + again) * keys, ring)
        yield line("ring K, V, backward", "permute", 2 * hops, 2 * hops * keys, ring)
        yield line("ring dK, dV", "permute", 2 * ring, 2 * ring * keys, ring, wide(run))


def loss(run):
    """Vocabulary-parallel loss: a maximum and two sums per token; and once a step the loss and the count of tokens."""
    m, tokens = run.train.microbatches, tokens_per_device(run)
    chunks = -(-tokens // run.parallel.loss_chunk)
    if run.mesh.tp > 1:
        padded = chunks * -(-tokens // chunks)
        yield Line(("tp",), "vocabulary-parallel loss", "all-reduce", "micro-batch", 2 * m * chunks, 3 * m * padded, wide(run), run.mesh.tp)
    axes = run.mesh.live(("dp", "fsdp", "ep", "sp"))
    if axes:
        yield Line(axes, "token count", "all-reduce", "step", 1, 1, 4, group(run, axes))
        yield Line(axes, "loss", "all-reduce", "step", 1, 1, wide(run), group(run, axes))


def reductions(run, table):
    """Gradients in gradient dtype: stage 2 in every micro-batch, stages 1 and 0 once a step; what tp ranks hold in copies, once a step."""
    m, width = run.train.microbatches, BYTES[run.precision.gradient(run.train.microbatches)]
    sums = defaultdict(lambda: [0, 0])

    def add(axes, what, kind, when, calls, elements):
        if axes:
            entry = sums[axes, what, kind, when]
            entry[0] += calls
            entry[1] += elements

    for p in table.values():
        add(p.axes(2), "ZeRO-2 gradients", "reduce-scatter", "micro-batch", m, m * p.elements(p.storage))
        add(p.axes(1), "ZeRO-1 gradients", "reduce-scatter", "step", 1, p.elements(p.gradient))
        rest = p.axes(0) + ("tp",) * p.tp_sum
        what = "gradients of copies over tp" if rest == ("tp",) else "ZeRO-0 gradients"
        add(rest, what, "all-reduce", "step", 1, p.elements(p.optimizer))
    for (axes, what, kind, when), (calls, elements) in sums.items():
        yield Line(axes, what, kind, when, calls, elements, width, group(run, axes))


def updates(run, table):
    """After the update, the parameters of stages 1 and 2 in parameter dtype: one all-gather a step."""
    sums = defaultdict(lambda: [0, 0])
    for p in table.values():
        axes = tuple(axis for axis in p.mesh.sizes if p.stages.get(axis) in (1, 2))
        if axes:
            sums[axes][0] += 1
            sums[axes][1] += p.elements(p.storage)
    for axes, (calls, elements) in sums.items():
        yield Line(axes, "updated parameters", "all-gather", "step", calls, elements, BYTES[run.precision.params], group(run, axes))
