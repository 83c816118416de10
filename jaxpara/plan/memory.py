"""Bytes per device that a train step needs, from the config alone: its arguments, and what is alive at the fullest moment. No JAX.

The step's memory is its arguments (the state, which is donated, so that its results lie where it lay, and the batch) and temporaries. Three
moments compete for the most: the loss (saved activations and one chunk of logits), the backward pass of a layer (saved activations, the layer's
working set, gathered weights, gradients) and the update. Every figure counts arrays that the program names; none is fitted.
"""
from collections import Counter
from functools import cache
from importlib.metadata import version
from itertools import permutations
from math import prod

from jaxpara.config import BYTES
from jaxpara.params import kinds, layers_of, period, segments
from jaxpara.pipeline.placing import divergent, only, schedule, stack
from jaxpara.plan.passes import passes
from jaxpara.plan.routed import Routed
from jaxpara.plan.stages import borders, carried, pair, pairs, stacked_ticks
from jaxpara.rules import local_shape
from jaxpara.zero import placements

OPTIMIZER_TENSORS = {"sgd": 0, "momentum": 1, "adamw": 2}
"""n_opt: optimizer tensors per parameter."""

KINDS = ("saved", "slots", "pairs", "logits", "working", "weights", "gathered", "gradients")
"""Kinds of temporaries. slots: activations and cotangents at borders that a pipeline's stages keep for other ticks; pairs: what its B leaves W."""

COUNTERS = {"sgd": 1, "momentum": 1, "adamw": 2}
"""int32 scalars of the optax state: the schedule's step, and Adam's own."""

ATTENTION_BLOCK, SMALLEST_BLOCK = 512, 64
"""As in `jaxpara.kernels.local`, which needs JAX; a test compares them."""


def model_state(run):
    """Bytes per device by part, and their total: (δ + δ_grad + (n_opt+1)·δ_opt)·Φ of SPEC section 1 (no +1 without a master copy),
    each part divided by what its ZeRO spec shards it over. Gradients are those held between micro-batches."""
    precision, table = run.precision, placements(run).values()
    held = lambda kind: sum(p.elements(getattr(p, kind)) for p in table)
    optimizer = BYTES[precision.optimizer]
    parts = {"parameters": sum(p.elements(p.storage) * BYTES[precision.stored(p.parameter)] for p in table),
             "gradients": held("gradient") * BYTES[precision.gradient(run.train.microbatches)],
             "master": held("optimizer") * optimizer if precision.master else 0,
             "optimizer": held("optimizer") * optimizer * OPTIMIZER_TENSORS[run.optim.name]}
    return {**parts, "total": sum(parts.values())}


def tiled(shape, width):
    """Bytes of an array on TPU, elements of `width` bytes: its two most minor dims are filled up to whole tiles.

    XLA chooses as minor the two dims that waste least. A tile is 128 elements wide and 8 high, or the next power of 2 where the dim is
    smaller; 16-bit elements are packed in pairs of rows. A 1-dim array is filled up to a power of 2 between 128 words and 1024
    elements, longer ones to a multiple of 1024; a scalar takes 512 bytes. (Seen on v5p: 40 shapes, exact.)
    """
    pack = max(4 // width, 1)
    power = lambda size, low, high: min(high, max(low, 1 << (size - 1).bit_length()))
    fill = lambda size, step: -(-size // step) * step
    if len(shape) < 2:
        size = prod(shape)
        return fill(size, power(size, 128 * pack, 1024)) * width
    filled = (prod(shape) // (minor * second) * fill(minor, 128) * fill(second, power(second, pack, 8)) for minor, second in permutations(shape, 2))
    return width * min(filled)


def argument_arrays(run):
    """Yield (part, shape on one device, bytes per element) of every argument of the compiled step.

    jit drops arguments that nothing reads: row numbers serve dropout only. Positions and documents are those of whole rows.
    """
    precision, optimizer = run.precision, BYTES[run.precision.optimizer]
    for placement in placements(run).values():
        shape = lambda spec: local_shape(placement.shape, spec, run.mesh)
        yield "parameters", shape(placement.storage), BYTES[precision.stored(placement.parameter)]
        tensors = OPTIMIZER_TENSORS[run.optim.name]
        yield from [("optimizer", shape(placement.optimizer), optimizer)] * tensors
        yield from [("master", shape(placement.optimizer), optimizer)] * bool(precision.master)
    yield from [("scalars", (), 4)] * (2 + COUNTERS[run.optim.name])        # beside the counters: step and stopped
    m, seq = run.train.microbatches, run.train.seq
    rows = run.train.batch // m // run.mesh.batch
    yield from [("batch", (m, rows, seq // run.mesh.sp), 4)] * 2            # tokens, targets
    yield from [("batch", (m, rows, seq), 4)] * 2                           # positions, documents
    yield from [("batch", (m, rows), 4)] * run.model.random
    yield from [("scalars", (run.model.layers, run.model.moe.experts), 4)] * bool(run.model.moe.bias_rate)


def arguments(run, platform="cpu"):
    """Bytes per device of the step's arguments: {"parameters", "master", "optimizer", "scalars", "batch", "padding", "total"}.

    The total is `compiled.memory_analysis().argument_size_in_bytes`. padding: what TPU tiles add (`tiled`), 0 elsewhere.
    """
    parts = dict.fromkeys(("parameters", "master", "optimizer", "scalars", "batch", "padding"), 0)
    for part, shape, width in argument_arrays(run):
        size = prod(shape) * width
        parts[part] += size
        parts["padding"] += tiled(shape, width) - size if platform == "tpu" else 0
    return {**parts, "total": sum(parts.values())}


@cache
def cpu_widens():
    """Whether the installed XLA:CPU widens 16-bit arithmetic to float32, and what loops carry with it: it did before jaxlib 0.12."""
    return tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 12)


def compute_width(run, platform):
    """Bytes per element of activations."""
    return max(BYTES[run.precision.compute], 4 if platform == "cpu" and cpu_widens() else 0)


class Sizes:
    """Bytes per device of the tensors of one layer and one micro-batch.

    border: [b, s, H] between blocks; inside: the same within a block, where tp ranks hold all tokens; query, keys, inner: [b, s, N_q·d],
    [b, s, N_kv·d], [b, s, H_ffn] of this device's heads and columns. wide: times which a tensor in float32 or wider is larger.
    """

    def __init__(self, run, platform):
        model, mesh, self.width = run.model, run.mesh, compute_width(run, platform)
        self.wide = max(self.width, 4)
        self.rows = run.train.batch // run.train.microbatches // mesh.batch
        self.length = run.train.seq // mesh.sp
        self.tokens = self.rows * self.length
        self.inside = self.tokens * model.width * self.width
        self.border = self.inside // (mesh.tp if run.parallel.tp_sequence else 1)
        self.heads = model.heads // mesh.tp
        self.query = self.tokens * self.heads * model.head_dim * self.width
        self.keys = self.tokens * max(model.kv_heads // mesh.tp, 1) * model.head_dim * self.width
        self.inner = self.tokens * model.ffn // mesh.tp * self.width
        self.lse = self.tokens * self.heads * self.wide
        self.experts = Routed(run, self, platform) if run.model.moe.experts else None

    def scores(self, run):
        """One block of attention scores, wide: queries × keys of at most ATTENTION_BLOCK each; on a ring half a shard, on Ulysses' side of
        its exchange longer sequences of fewer heads."""
        kind, sp = run.parallel.sp_kind, run.mesh.sp
        degree = {"ulysses": sp, "hybrid": run.parallel.sp_ulysses or 1}.get(kind, 1) if sp > 1 else 1
        length = self.length * degree
        ring = sp > 1 and kind in ("ring", "hybrid") and degree < sp
        limit = max(min(ATTENTION_BLOCK, max(length // 2, 1)) if ring else ATTENTION_BLOCK, SMALLEST_BLOCK)
        piece = lambda length: -(-length // -(-length // limit))
        keys = length * sp if sp > 1 and kind == "allgather" else length
        return self.rows * max(self.heads // degree, 1) * piece(length) * piece(keys) * self.wide


def shape_of_border(run):
    """(b, s, H) of one micro-batch at a border, on one device."""
    size = Sizes(run, "tpu")
    return size.rows, size.length // (run.mesh.tp if run.parallel.tp_sequence else 1), run.model.width


def shapes_of_pair(run):
    """Shapes on one device of what a layer's matmuls read and give."""
    size, model, tp = Sizes(run, "tpu"), run.model, run.mesh.tp
    inner = [(model.ffn // tp,)] * ("dense" in kinds(model))
    inner += [(size.experts.shared_width,)] if size.experts and model.moe.shared else []
    widths = (model.width,), (size.heads, model.head_dim), (max(model.kv_heads // tp, 1), model.head_dim), *inner
    return [(size.rows, size.length, *width) for width in widths]


def residuals(run, platform, kind="dense"):
    """{tensor: bytes} that autograd keeps of one layer when everything is kept (SPEC section 2, remat = none), gathered arrays apart.

    Each norm: its input and output. Attention: q, k, v, out, the rows' log-normaliser. MLP: up, gate and their product; gpt2: up and the
    activation. Experts: these of their rows, the rows themselves and what came back of them. What is elementwise in norms and activations is
    computed again (`collectives.recomputed`). Dropout: two masks of a byte.
    """
    size, model = Sizes(run, platform), run.model
    wide = size.wide // size.width
    feed = {"mlp inner": projections(model) * size.inner} if kind == "dense" else size.experts.residuals()
    kept = {"norm inputs": 2 * size.border, "norm outputs": 2 * size.border, "query, key, value": size.query + 2 * size.keys,
            "attention out": outputs(run) * size.query, "log-normalisers": size.lse, **feed}
    if model.qk_norm:
        kept["head norms"] = (1 + wide) * (size.query + size.keys)
    if model.dropout:
        kept["dropout masks"] = 2 * size.border // size.width
    return kept


def saved(run, platform="cpu"):
    """{tensor: bytes per device} kept of layers until they run backward, under the run's recompute policy (`jaxpara.context.Ctx.remat`): of all,
    or in a pipeline of one chunk's, in the circular scan without remat_tick in every tick."""
    size, parallel, kept = Sizes(run, platform), run.parallel, Counter()
    inputs = size.border // (run.mesh.tp if parallel.zero_r and parallel.remat == "full" and not parallel.tp_sequence else 1)
    for kind in dict.fromkeys(kinds(run.model)):
        of_kind = only(stack(run), layers_of(run.model, kind))
        layers = len(of_kind.rows) if run.mesh.pp == 1 else of_kind.length * stacked_ticks(run)
        one = {"none": lambda: residuals(run, platform, kind),
               "full": lambda: {"layer inputs": inputs},
               "selective": lambda: {"layer inputs": inputs, **selected(run, platform, kind)}}[parallel.remat]
        if passes(run).merged:      # one layer's are its working set
            one = (lambda: {"layer inputs": size.border}) if passes(run).length == 1 else lambda: residuals(run, platform, kind)
        kept.update({name: layers * held for name, held in one().items()})
    return {**kept, **in_every_tick(run, size)} if stacked_ticks(run) > 1 and not passes(run).merged else dict(kept)


def in_every_tick(run, size):
    """{tensor: bytes} that the circular scan without remat_tick keeps of every tick beside activations: the chunk's weights where there are several
    chunks to take them from, and the tables of the rotation."""
    chunks, once = stack(run).chunks, run.parallel.gather_once
    varying = [p.elements(p.base if once else p.storage) // chunks for p in placements(run).values() if p.parameter.stacked and chunks > 1]
    rotation = size.tokens * run.model.head_dim * size.wide if run.model.style == "llama" else 0
    return {"weights": stacked_ticks(run) * sum(varying) * size.width, "rotation": stacked_ticks(run) * rotation}


def outputs(run):
    """Layouts in which attention's result is kept: by heads for its own backward pass and, where Ulysses exchanges it, by tokens."""
    return 2 if run.mesh.sp > 1 and run.parallel.sp_kind in ("ulysses", "hybrid") else 1


def projections(model):
    """Tensors as wide as the feed-forward block that its backward pass needs: up, gate and their product; gpt2: up and the activation."""
    return 3 if model.style == "llama" else 2


def selected(run, platform, kind):
    """{tensor: bytes} of one layer that selective recomputation keeps."""
    size = Sizes(run, platform)
    if run.parallel.remat_save == "attention":
        return {"attention out": outputs(run) * size.query, "log-normalisers": size.lse}
    inner = (projections(run.model) - 1) * (size.inner if kind == "dense" else size.experts.inner + size.experts.shared)
    return {"query, key, value": size.query + 2 * size.keys, "attention exit": size.border, "mlp inner": inner}


def working_set(run, platform):
    """Bytes alive in the backward pass of one layer, beside what was saved.

    Inside a block the recomputed inputs of both blocks and the gathered cotangents of both (4); at the border the layer's input, the
    one between its blocks and their cotangents; of attention q, out and their cotangents; of the MLP the cotangents of both projections, and
    gate, up or their product where they are recomputed. XLA:CPU does not fuse elementwise chains with matmuls: the MLP's tensors exist in
    two layouts, and it delays weight gradients, so that they are still there with two blocks of attention scores. XLA:TPU has one or
    the other. XLA:GPU is done with the scores by then, but still has the wide sums of the recomputed attention, and the input cotangents of up and
    gate beside their sum.
    """
    size, parallel = Sizes(run, platform), run.parallel
    recomputed = parallel.remat == "full" or parallel.remat == "selective" and parallel.remat_save == "attention"
    scores, heads, inside = 2 * size.scores(run), 4 * size.query, 4 * size.inside
    narrow = run.mesh.pp > 1 and BYTES[run.precision.compute] < size.width
    if platform == "tpu":
        return max(feed(run, size, 4 if recomputed else 2, recomputed), scores) + inside + 2 * size.border + heads
    if platform == "gpu":
        sums = 2 * size.query if recomputed else 0
        return feed(run, size, 4 if recomputed else 3, recomputed) + sums + inside + 2 * size.inside + 2 * size.border + heads
    several = (8 if run.model.style == "llama" else 6) if recomputed else 4
    beside = scores + inside + 4 * size.border + heads
    if period(run.model) > 1:       # XLA:CPU runs all layers of a period again before it goes backward through them
        pattern = max((pattern for pattern, _ in segments(run.model, passes(run).length)), key=len)
        return sum(beside + feeds(size, several, recomputed)[kind]() for kind in pattern)
    return (feed(run, size, several, recomputed) + beside) * (3 if narrow else 4) // 4


def feed(run, size, several, recomputed):
    """Bytes of the feed-forward block in its backward pass, of the kind of layer that needs more."""
    return max(feeds(size, several, recomputed)[kind]() for kind in kinds(run.model))


def feeds(size, several, recomputed):
    """{kind: function that gives these bytes}: `several` of the tensors of its inner width, or what experts need."""
    return {"dense": lambda: several * size.inner, "moe": lambda: size.experts.working(several, recomputed)}


def weights(run, platform):
    """{part: bytes per device}: copies of weights, gathered ones, and gradients, while layers run backward.

    copies: in compute dtype where parameters have another; where not, XLA:CPU copies what a loop reads and the update replaces: all of it, or under
    stages 1 and 2 this device's part (round a pipeline it copies the optimizer's tensors instead, and the donated ones hold as many temporaries).
    gathered: the whole layer under ZeRO-3; with `gather_once` all, and on CPU one layer that is taken out of the stack, as under other stages of a
    pipeline. gradients: see below.
    """
    precision, table, compute = run.precision, placements(run), compute_width(run, platform)
    copied = "storage" if precision.compute != precision.params else "optimizer" if platform == "cpu" and run.mesh.pp == 1 else None
    layer = sum(layer_elements(run, table, platform == "cpu" and run.mesh.pp > 1))
    gathered = sum(p.elements(p.base) for p in table.values() if p.axes(3)) + layer * (platform == "cpu") if run.parallel.gather_once else layer
    backward = sum(pipeline_gradients(run, table, platform)) if run.mesh.pp > 1 else gradients(run, table, platform)
    return {"weights": sum(p.elements(getattr(p, copied)) for p in table.values()) * compute if copied else 0,
            "gathered": gathered * compute, "gradients": backward}


def layer_elements(run, table, whole=False):
    """Elements of each parameter of one layer that ZeRO-3 gathers, or `whole`: of all; of the kind of layer that has most of them."""
    part = {"dense": ".mlp.", "moe": ".moe."}
    taken = [p for p in table.values() if p.parameter.stacked and (whole or p.axes(3))]
    without = lambda other: [p.elements(p.base) // p.held for p in taken if part[other] not in p.name]
    return max((without("moe" if kind == "dense" else "dense") for kind in dict.fromkeys(kinds(run.model))), key=sum)


def pipeline_gradients(run, table, platform):
    """(bytes of the sums, of one chunk's gradients on their way there): of all parameters, and of the chunk as backward leaves it, with one layer's
    before it is scattered. The circular scan sums layers only, beside what the loss before it left of the head. With `gather_once` all are whole.
    XLA:GPU has a layer's whole gradients all at one time, and scatters them while the next layer makes its own.
    """
    once, width = run.parallel.gather_once, BYTES[run.precision.gradient(run.train.microbatches)]
    kept = lambda p, kind: p.elements(p.base if once and p.axes(3) else getattr(p, kind))
    head = "embedding.tokens" if run.model.tied else "head.weight"
    sums = sum(kept(p, "gradient") for p in table.values() if divergent(run) or p.parameter.stacked or p.name == head)
    chunk = sum(kept(p, "storage") for p in table.values() if p.parameter.stacked) // stack(run).chunks
    layer = layer_elements(run, table)
    waiting = sum(layer) * min(passes(run).length, 2) if platform == "gpu" else max(layer, default=0)
    return sums * width, (chunk + (0 if once else waiting)) * width


def gradients(run, table, platform):
    """Bytes of gradients while layers run backward: those of all layers and of the head as backward leaves them (sharded over the axes of
    stage 3), with m > 1 the sums of all, in the gradient specs, and under ZeRO-3 whole ones of a layer before they are scattered.

    XLA:TPU lets the layers' gradients lie in donated parameters that were copied and of which the update reads a part only (stages 1
    and 2). In its accumulation loops it carries whole buffers for the gradients of embedding and head, and the head's waits for its scatter.
    XLA:GPU has all whole gradients of a layer's matrices at one time, makes the embedding's zeros before they are needed, and scatters the
    head's late.
    """
    precision, m = run.precision, run.train.microbatches
    width, size = BYTES[precision.gradient(m)], max(BYTES[precision.gradient(m)], 4)
    head = "embedding.tokens" if run.model.tied else "head.weight"
    left = sum(p.elements(p.storage) for p in table.values() if p.parameter.stacked or p.name == head)
    sums = sum(p.elements(p.gradient) for p in table.values()) if m > 1 else 0
    layer = layer_elements(run, table)
    tables = [p.elements(p.base) for p in table.values() if not p.parameter.stacked and len(p.shape) > 1]
    if platform == "gpu":
        return (left + sums + sum(layer)) * width + (sum(tables) - table[head].elements(table[head].storage)) * size
    if platform == "tpu" and precision.compute != precision.params and width == BYTES[precision.params]:
        left -= sum(p.elements(p.storage) for p in table.values() if p.parameter.stacked and p.axes(1, 2))
    waiting = (sum(tables) + max(tables)) * size if platform == "tpu" and m > 1 and table[head].axes(3) else 0
    return (left + sums + max(layer, default=0)) * width + waiting


def moments(run, platform="cpu"):
    """{"loss" | "backward" | "weight" | "update": {part: bytes per device}}: what is alive beside the arguments at the moments that may be the
    fullest; "weight", the weight gradients that a pipeline's W makes."""
    size, table, precision, m = Sizes(run, platform), placements(run), run.precision, run.train.microbatches
    rest, kept = weights(run, platform), sum(saved(run, platform).values())
    accumulated = sum(p.elements(p.gradient) for p in table.values()) * BYTES[precision.gradient(m)] * (m > 1)
    updated = sum(p.elements(p.optimizer) for p in table.values()) * max(BYTES[precision.optimizer], 4)
    none, loss = dict.fromkeys(KINDS, 0), at_the_loss(run, size, table, rest["weights"], platform)
    found = {"loss": {**none, **loss, "saved": kept, "weights": rest["weights"], "gradients": loss["gradients"] + accumulated},
             "backward": {**none, "saved": kept, "working": working_set(run, platform), **rest},
             "update": {**none, "weights": updated, "gradients": updated}}
    return found if run.mesh.pp == 1 else {**found, **ticks_of(run, size, table, platform, {**found, "loss": {**none, **loss}})}


def at_the_loss(run, size, table, copied, platform):
    """{part: bytes} of one call of the loss: its logits, their exponentials and, where XLA does not fuse these, their gradients; its tokens in and
    out, the head's weight and its gradient. copied: whether weights are."""
    tokens = passes(run).tokens * (run.mesh.tp if run.parallel.tp_sequence else 1)
    head = table["embedding.tokens" if run.model.tied else "head.weight"]
    chunks = -(-tokens // run.parallel.loss_chunk)
    logits = -(-tokens // chunks) * (head.elements(head.base) // run.model.width)
    return {"logits": (3 if platform == "cpu" else 2) * logits * size.wide, "working": (2 * size.inside + size.border) * tokens // size.tokens,
            "gathered": head.elements(head.base) * size.width if head.axes(3) or copied else 0,
            "gradients": head.elements(head.base) * size.wide}


def ticks_of(run, size, table, platform, found):
    """The moments of a pipeline's ticks, from those of a loss and of a layer alone: what waits for a later tick lies there all the time.

    No layer runs at the loss of a table. The circular scan's one loss stands between all forward ticks and all backward ones, with the outputs as the
    ticks left them and as they are dealt to the stages.
    """
    kept, rest, (sums, chunk) = borders(run), weights(run, platform), pipeline_gradients(run, table, platform)
    whole = rest["gathered"] if run.parallel.gather_once else 0
    loss, backward = {**found["loss"], "weights": rest["weights"]}, found["backward"]
    loss["gathered"] = whole or loss["gathered"]
    border = carried(run, size.border, size)
    backward = {**backward, "slots": sum(kept.values()) * border, "pairs": pairs(run, size, platform)}
    if not divergent(run):
        outs = kept["tick inputs"] + kept["cotangents of outputs"] + run.train.microbatches
        return {"loss": {**loss, "slots": outs * border, "saved": backward["saved"] * (stacked_ticks(run) > 1)}, "backward": backward}
    loss |= {"slots": backward["slots"], "pairs": backward["pairs"], "gradients": loss["gradients"] + sums}
    # accelerators read a layer's pairs where they lie
    layer = pair(run, size) // stack(run).length if platform == "cpu" else 0
    weight = {**backward, "saved": 0, "pairs": pairs(run, size, platform), "working": layer, "gathered": whole, "gradients": sums + chunk}
    return {"loss": loss, "backward": backward, **({"weight": weight} if schedule(run).split else {})}


def temporaries(run, platform="cpu"):
    """Bytes per device alive beside the arguments at the fullest moment, by KINDS, and "total".

    To be held against XLA's own peak: on CPU `temp_size_in_bytes`, on TPU `peak_memory_in_bytes` - `argument_size_in_bytes` (its temp_size counts
    more than the heap ever holds).
    """
    fullest = max(moments(run, platform).values(), key=lambda parts: sum(parts.values()))
    return {**fullest, "total": sum(fullest.values())}


def peak(run, platform="cpu"):
    """{"arguments", "temporaries", "total", "moment"}: bytes per device, and when most is alive. The donated state becomes the new one in place."""
    each = {moment: sum(parts.values()) for moment, parts in moments(run, platform).items()}
    moment, before = max(each, key=each.get), arguments(run, platform)["total"]
    return {"arguments": before, "temporaries": each[moment], "total": before + each[moment], "moment": moment}
