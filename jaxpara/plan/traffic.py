"""What one device sends in one step, from the config alone: the closed forms of ZeRO, tensor and sequence parallelism. No JAX.

These are the manual lowering's, as the compiled program has them: what compilers are known to merge is counted once and said where
it is counted. Under the annotated lowering XLA chooses.
"""
from jaxpara.checks import ring_degree, ulysses_degree
from jaxpara.config import BYTES
from jaxpara.plan.lines import Line
from jaxpara.plan.weights import norm, reductions, size, updates, zero3
from jaxpara.zero import placements


def traffic(run):
    """Every `Line` of a run's train step, in the order of the step; empty on one device."""
    table = placements(run)
    lines = [*zero3(run, table), *tensor(run), *sequence(run), *loss(run), *reductions(run, table), *norm(run, table), *updates(run, table)]
    return [line for line in lines if line.elements]


def wide(run):
    """Dtype of an accumulator: float32, or float64 in float64 runs."""
    return "float64" if BYTES[run.precision.compute] == 8 else "float32"


def tokens_per_device(run):
    """b·S/N_sp: tokens of one micro-batch inside a block on one device."""
    return run.train.batch // run.train.microbatches // run.mesh.batch * run.train.seq // run.mesh.sp


def attention_again(run):
    """Whether the backward pass runs attention's forward pass again."""
    return run.parallel.remat == "full" or (run.parallel.remat, run.parallel.remat_save) == ("selective", "matmuls")


def tensor(run):
    """Per attention or MLP block 2 all-reduces (8δb(S/N_sp)H per layer), with Megatron-SP as gathers and scatters and the backward
    re-gather of each block's input (10). Recompute repeats the attention exit; the MLP's is dead."""
    if run.mesh.tp == 1:
        return
    m, layers, elements = run.train.microbatches, run.model.layers, tokens_per_device(run) * run.model.width
    keeps_exit = run.parallel.remat == "selective" and run.parallel.remat_save == "matmuls"
    repeated = run.parallel.remat != "none" and not keeps_exit
    megatron = run.parallel.tp_sequence

    def line(what, kind, phase, owner, calls=layers, when="block"):
        return Line(kind, ("tp",), run.precision.compute, elements, m * calls, phase, owner, run.mesh.tp, what, when)

    summed = "reduce-scatter" if megatron else "all-reduce"
    for block in ("attention", "mlp"):
        if megatron:
            yield line("block inputs, forward", "all-gather", "forward", block)
            yield line("block inputs, backward again", "all-gather", "recompute", block)
            yield line("block output gradients", "all-gather", "backward", block)
        yield line("block outputs, forward", summed, "forward", block)
        yield line("block input gradients", summed, "backward", block)
    if repeated:
        yield line("block outputs, forward", summed, "recompute", "attention")
    for owner, into, out in (("embedding", "backward", "forward"), ("head", "forward", "backward")):
        if megatron:
            yield line("embedding and head", "all-gather", into, owner, 1, "micro-batch")
        yield line("embedding and head", summed, out, owner, 1, "micro-batch")
    if not megatron and run.parallel.zero_r and run.parallel.remat == "full":
        yield line("ZeRO-R layer inputs", "all-gather", "recompute", "", layers, "layer")


def sequence(run):
    """Ring (4 + 2δ_acc/δ)·δbSN_kv·d/N_tp, Ulysses 4(N_kv/N_q + 1)·δbSN_q·d/(N_sp·N_tp), all-gather KV: per layer and micro-batch."""
    if run.mesh.sp == 1:
        return
    inner, kv_heads = ulysses_degree(run), max(run.model.kv_heads // run.mesh.tp, 1)
    keys = tokens_per_device(run) * (max(kv_heads, inner) if inner > 1 else kv_heads) * run.model.head_dim
    if run.parallel.sp_kind == "allgather":
        yield from gathered_keys(run, keys)
        return
    if inner > 1:
        yield from ulysses(run, keys, inner)
    if ring_degree(run) > 1:
        yield from ring(run, keys, ring_degree(run))


def attention_line(run, n, what, kind, phase, elements, calls=1, dtype=None):
    """A line of attention's exchange over sp: `calls` per layer and micro-batch."""
    calls *= run.train.microbatches * run.model.layers
    return Line(kind, ("sp",), dtype or run.precision.compute, elements, calls, phase, "attention", n, what, "layer")


def gathered_keys(run, keys):
    """Keys and values, forward and backward, and their gradients. keys: elements of one device's K.

    Where the forward pass is run again, its gathers are the backward pass's too: compilers keep one of each two.
    """
    full, n = keys * run.mesh.sp, run.mesh.sp
    yield attention_line(run, n, "keys and values, forward", "all-gather", "forward", full, 2)
    yield attention_line(run, n, "keys and values, backward", "all-gather", "recompute" if run.parallel.remat == "full" else "backward", full, 2)
    yield attention_line(run, n, "key and value gradients", "reduce-scatter", "backward", full, 2, wide(run))


def ulysses(run, keys, n):
    """q, k, v in, out back, and the reverse in backward. A policy that keeps attention keeps `out`, so only q, k, v go in again."""
    queries = tokens_per_device(run) * run.model.heads // run.mesh.tp * run.model.head_dim
    keeps_attention = run.parallel.remat == "selective" and run.parallel.remat_save == "attention"
    again = attention_again(run)
    for phase, into, out in (("forward", 1, 1), ("recompute", again or keeps_attention, again), ("backward", 1, 1)):
        what = "Ulysses, backward" if phase == "backward" else "Ulysses, forward"
        if into:
            yield attention_line(run, n, what, "all-to-all", phase, keys, 2)
        if into + out:
            yield attention_line(run, n, what, "all-to-all", phase, queries, into + out)


def ring(run, keys, n):
    """K, V around the ring of n in n-1 hops; in backward again, with dK, dV in n hops that bring them home.

    In a ring of two whose forward pass is run again, that pass's one hop and the backward pass's are the same hop: it is sent once.
    """
    hops, again = n - 1, attention_again(run)
    yield attention_line(run, n, "ring K, V, forward", "permute", "forward", keys, 2 * hops)
    if again:
        yield attention_line(run, n, "ring K, V, forward", "permute", "recompute", keys, 2 * hops)
    if not (again and n == 2):
        yield attention_line(run, n, "ring K, V, backward", "permute", "backward", keys, 2 * hops)
    yield attention_line(run, n, "ring dK, dV", "permute", "backward", keys, 2 * n, wide(run))


def loss(run):
    """Vocabulary-parallel loss: a maximum and two sums per token; and once a step the loss and the count of tokens."""
    tokens, dtype = tokens_per_device(run), wide(run)
    chunks = -(-tokens // run.parallel.loss_chunk)
    if run.mesh.tp > 1:
        for numbers in (1, 2):
            yield Line("all-reduce", ("tp",), dtype, numbers * -(-tokens // chunks), run.train.microbatches * chunks, "loss", "loss",
                       run.mesh.tp, "vocabulary-parallel loss", "micro-batch")
    axes = run.mesh.live(("dp", "fsdp", "ep", "sp"))
    if axes:
        yield Line("all-reduce", axes, "int32", 1, 1, "loss", "loss", size(run, axes), "token count", "step")
        yield Line("all-reduce", axes, dtype, 1, 1, "loss", "loss", size(run, axes), "loss", "step")
