"""What one device sends in one step, from the config alone: the closed forms of ZeRO, tensor and sequence parallelism. No JAX.

These are the manual lowering's, as the compiled program has them: what compilers are known to merge is counted once and said where
it is counted. Under the annotated lowering XLA chooses.
"""
from dataclasses import replace

from jaxpara.checks import ring_degree, ulysses_degree
from jaxpara.params import segments
from jaxpara.pipeline.placing import divergent
from jaxpara.plan.lines import Line
from jaxpara.plan.moe import moe, parts_of_tokens
from jaxpara.plan.passes import border_tokens, borders, passes, passes_of, tokens_per_device
from jaxpara.plan.weights import norm, reductions, size, updates, wide, zero3
from jaxpara.zero import REPLICA_AXES, placements


def traffic(run, platform="cpu"):
    """Every `Line` of a run's train step, in the order of the step; empty on one device. platform: cpu | tpu | gpu; a ring inside a pipeline's
    table is an all-gather on cpu."""
    table = placements(run)
    lines = [*pipeline(run), *zero3(run, table), *tensor(run), *sequence(run, platform), *moe(run), *loss(run), *reductions(run, table),
             *norm(run, table), *updates(run, table)]
    lines = (in_loops(line, run, platform) for line in lines)
    return [line for line in lines if line.elements and line.calls]


def in_loops(line, run, platform):
    """A line without what compilers merge: of layers that no loop runs over, XLA:CPU and XLA:GPU take the second gather of a weight, or of a kept
    block input, for the first, whatever barrier is between."""
    kept = line.owner.startswith("layers.") or line.axes == ("tp",) and line.kind == "all-gather" and run.parallel.remat == "none"
    if not line.calls or line.phase != "recompute" or not kept or run.mesh.pp > 1 or platform == "tpu":
        return line
    kind = {"mlp": "dense", "moe": "moe"}.get(line.owner.removeprefix("layers.").split(".")[0])
    count = lambda repeats: sum(times * (pattern.count(kind) if kind else len(pattern)) for pattern, times in segments(run.model, run.model.layers)
                                if times >= repeats)
    return replace(line, calls=line.calls // count(1) * count(2))


def pipeline(run):
    """δbSH/(N_sp·N_tp with Megatron-SP) each way per border, micro-batch and chunk. Every stage sends whenever one has to: the rest goes out with
    nothing in it. And what spreads the head over the stages: the outputs of the last, and back their gradients."""
    if run.mesh.pp == 1:
        return
    p, width, count = run.mesh.pp, run.model.width, passes(run)

    def line(what, kind, elements, calls, phase, owner, when):
        return Line(kind, ("pp",), run.precision.compute, elements, calls, phase, owner, p, what, when)

    for border in borders(run):
        elements = border_tokens(run) * width
        yield line("stage borders", "permute", elements, border.useful, border.phase, "border", "border")
        yield line("stage borders, nothing to send", "permute", elements, border.calls - border.useful, border.phase, "border", "tick")
    for what, kind, phase in (("last outputs to all stages", "all-to-all", "forward"), ("their gradients back", "all-gather", "backward")):
        yield line(what, kind, p * count.tokens * width, count.losses, phase, "head", "micro-batch")


def attention_again(run):
    """Whether the backward pass runs attention's forward pass again, layer by layer."""
    return not passes(run).merged and (run.parallel.remat == "full" or (run.parallel.remat, run.parallel.remat_save) == ("selective", "matmuls"))


def tensor(run):
    """Per attention or MLP block 2 all-reduces (8δb(S/N_sp)H per layer), with Megatron-SP as gathers and scatters and the backward
    re-gather of each block's input (10). Recompute repeats the attention exit; the MLP's is dead."""
    if run.mesh.tp == 1:
        return
    count, elements = passes(run), tokens_per_device(run) * run.model.width
    feeds = {"attention": count, "mlp": passes_of(run, "dense"), "moe": passes_of(run, "moe")}
    if run.parallel.moe_tp == "tokens":
        yield from parts_of_tokens(run, feeds.pop("moe"), elements)
    keeps_exit = run.parallel.remat == "selective" and run.parallel.remat_save == "matmuls"
    repeated = run.parallel.remat != "none" and not keeps_exit and not count.merged
    megatron = run.parallel.tp_sequence

    def line(what, kind, phase, owner, calls=count.backward, when="block", elements=elements):
        return Line(kind, ("tp",), run.precision.compute, elements, calls, phase, owner, run.mesh.tp, what, when)

    summed = "reduce-scatter" if megatron else "all-reduce"
    for block, own in feeds.items():
        if megatron:
            yield line("block inputs, forward", "all-gather", "forward", block, own.forward)
            yield line("block inputs, forward again", "all-gather", "recompute", block, own.again)
            yield line("block inputs, backward again", "all-gather", "recompute", block, 0 if count.merged else own.backward)
            yield line("block output gradients", "all-gather", "backward", block, own.backward)
        yield line("block outputs, forward", summed, "forward", block, own.forward)
        # the output of a run of one period serves nobody a second time
        dead = count.merged and block == ("moe" if run.model.moe.experts else "mlp")
        yield line("block outputs, forward again", summed, "recompute", block, 0 if dead else own.again)
        yield line("block input gradients", summed, "backward", block, own.backward)
    if repeated:
        yield line("block outputs, forward", summed, "recompute", "attention")
    inside = count.tokens * run.model.width * (run.mesh.tp if megatron else 1)
    for owner, into, out, calls, whole in (("embedding", "backward", "forward", count.begins, count.batches * elements),
                                          ("head", "forward", "backward", count.losses, inside)):
        if megatron:
            yield line("embedding and head", "all-gather", into, owner, calls, "micro-batch", whole)
        yield line("embedding and head", summed, out, owner, calls, "micro-batch", whole)
    if not megatron and run.parallel.zero_r and run.parallel.remat == "full":
        yield line("ZeRO-R layer inputs", "all-gather", "recompute", "", 0 if count.merged else count.backward, "layer")


def sequence(run, platform):
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
        yield from ring(run, keys, ring_degree(run), divergent(run) and platform == "cpu")


def attention_line(run, n, what, kind, phase, elements, calls=1, dtype=None, again=False):
    """A line of attention's exchange over sp: `calls` per layer and micro-batch. again: of layers run again whole."""
    count = passes(run)
    calls *= count.again if again else count.forward if phase == "forward" else count.backward
    return Line(kind, ("sp",), dtype or run.precision.compute, elements, calls, phase, "attention", n, what, "layer")


def gathered_keys(run, keys):
    """Keys and values, forward and backward, and their gradients. keys: elements of one device's K.

    Where the forward pass is run again, its gathers are the backward pass's too: compilers keep one of each two.
    """
    full, n = keys * run.mesh.sp, run.mesh.sp
    yield attention_line(run, n, "keys and values, forward", "all-gather", "forward", full, 2)
    # of a run of one layer that is run again its gathers serve the backward pass too, which the values' gather is named after
    merged = passes(run).merged
    yield attention_line(run, n, "keys and values, forward again", "all-gather", "recompute", full, 1 if merged else 2, again=True)
    phase = "recompute" if run.parallel.remat == "full" and not merged else "backward"
    yield attention_line(run, n, "keys and values, backward", "all-gather", phase, full, 1 if merged else 2)
    yield attention_line(run, n, "key and value gradients", "reduce-scatter", "backward", full, 2, wide(run))


def ulysses(run, keys, n):
    """q, k, v in, out back, and the reverse in backward. A policy that keeps attention keeps `out`, so only q, k, v go in again."""
    queries = tokens_per_device(run) * run.model.heads // run.mesh.tp * run.model.head_dim
    keeps_attention = run.parallel.remat == "selective" and run.parallel.remat_save == "attention"
    again, keeps_attention = attention_again(run), keeps_attention and not passes(run).merged
    for phase, into, out, whole in (("forward", 1, 1, False), ("recompute", 1, 1, True), ("recompute", again or keeps_attention, again, False),
                                    ("backward", 1, 1, False)):
        what = "Ulysses, backward" if phase == "backward" else "Ulysses, forward" + " again" * whole
        if into:
            yield attention_line(run, n, what, "all-to-all", phase, keys, 2, again=whole)
        if into + out:
            yield attention_line(run, n, what, "all-to-all", phase, queries, into + out, again=whole)


def ring(run, keys, n, grouped):
    """K, V around the ring of n in n-1 hops; in backward again, with dK, dV in n hops that bring them home.

    In a ring of two whose forward pass is run again, that pass's one hop and the backward pass's are the same hop: it is sent once.
    grouped: each hop is an all-gather over sp of which a device keeps one piece (`collectives.rotate`).
    """
    hops, again = n - 1, attention_again(run)
    kind, size, devices = ("all-gather", keys * run.mesh.sp, run.mesh.sp) if grouped else ("permute", keys, n)
    line = lambda what, phase, calls, *dtype, **whole: attention_line(run, devices, f"ring {what}" + " by groups (CPU)" * grouped, kind, phase, size,
                                                                      calls, *dtype, **whole)
    yield line("K, V, forward", "forward", 2 * hops)
    yield line("K, V, forward again", "recompute", 2 * hops, again=True)
    if again:
        yield line("K, V, forward", "recompute", 2 * hops)
    if not ((again or passes(run).merged) and n == 2):
        yield line("K, V, backward", "backward", 2 * hops)
    yield line("dK, dV", "backward", 2 * n, wide(run))


def loss(run):
    """Vocabulary-parallel loss: a maximum and two sums per token; and once a step the loss and the count of tokens."""
    count, dtype = passes(run), wide(run)
    tokens = count.tokens * (run.mesh.tp if run.parallel.tp_sequence else 1)
    chunks = -(-tokens // run.parallel.loss_chunk)
    if run.mesh.tp > 1:
        for numbers in (1, 2):
            yield Line("all-reduce", ("tp",), dtype, numbers * -(-tokens // chunks), count.losses * chunks, "loss", "loss",
                       run.mesh.tp, "vocabulary-parallel loss", "micro-batch")
    for axes, what, kind in ((run.mesh.live(("dp", "fsdp", "ep", "sp")), "token count", "int32"),
                             (run.mesh.live(REPLICA_AXES), "loss", dtype)):
        if axes:
            yield Line("all-reduce", axes, kind, 1, 1, "loss", "loss", size(run, axes), what, "step")
