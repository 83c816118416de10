"""`ctx`: what the model knows of parallelism, and its two lowerings.

Manual: the model runs on one device's pieces inside a single `shard_map` over the whole mesh; every collective is ours.
Annotated: the model runs on global arrays under `jit`; sharding constraints say where things lie and XLA chooses the collectives,
kernels apart, which stay `shard_map`. Both run the same model code and give the same numbers.

A block sees a *border* layout ([b, S/N_sp, H], with `tp_sequence` [b, S/(N_sp·N_tp), H]) and, between `enter` and `exit`,
the inside of tensor parallelism: all of the sp shard's tokens, this device's heads or inner width.
"""
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpara.checks import ring_degree, ulysses_degree
from jaxpara import transport
from jaxpara.collectives import copy_in, gather, join_parts, match, rotate, scatter, scatter_in_steps, sum_out, sum_over, take_part, vary
from jaxpara.config import BATCH_AXES
from jaxpara.experts import layout, spanning, split_axes
from jaxpara.kernels import cross_entropy, local, ring, ulysses
from jaxpara.mesh import partition
from jaxpara.order import inverse, slots
from jaxpara.pipeline.placing import divergent
from jaxpara.rules import activation_rules, live
from jaxpara.taps import Tap, Tapped, Teller


@partial(jax.tree_util.register_dataclass, data_fields=["value", "sink"], meta_fields=["name"])
@dataclass
class Stored:
    """One parameter as stored: this device's piece in compute dtype, and the place where its gradient comes out.

    The loss is differentiated with respect to `sink`, zeros of the gradient dtype that nothing ever reads: so a bfloat16 weight gets
    a float32 gradient, reduced before it is rounded.
    """
    value: Any
    sink: Any
    name: str


class Rows(NamedTuple):
    """What the model is told about a micro-batch besides its tokens. All of whole rows, in slot order."""
    positions: jax.Array    # int32 [b, S]
    segments: jax.Array     # int32 [b, S]
    number: jax.Array | None    # int32 [b]: each row's place in the global batch; None: no dropout
    index: jax.Array        # int32 [S]: each slot's original place in its row
    key: jax.Array | None   # random key of this step; None: nothing random
    tick: jax.Array | None = None   # int32 []: in a scan whose every pass is to gather the weights of ZeRO-3 anew
    bias: jax.Array | None = None   # float32 [L, E]: the routers' selection bias
    weigh: jax.Array | None = None  # []: factor of the routers' losses in the backward pass; 0 where this pass is a bubble's; None: none
    warm: jax.Array | None = None   # []: warm-up factor of the load-balance loss


class Moment(NamedTuple):
    """What a step knows of the training before it."""
    step: jax.Array                 # int32 []
    bias: jax.Array | None = None   # of `Rows`


def attention_kernel(run, move=None):
    """The `Kernel` for a run's sp_kind, for one device's heads and slots. move: how a ring sends, if not by `shift`."""
    window, sp, inner = run.model.window, run.mesh.sp, ulysses_degree(run)
    if sp == 1:
        return ring.whole(window)
    if run.parallel.sp_kind == "allgather":
        return ring.allgather("sp", window)
    inside = ring.ring("sp", ring_degree(run), inner, window, move=move) if ring_degree(run) > 1 else ring.whole(window)
    kv_heads = max(run.model.kv_heads // run.mesh.tp, 1)
    return inside if inner == 1 else ulysses.ulysses("sp", sp, inner, kv_heads, inside)


def differentiable(forward, backward):
    """A function (q, k, v, positions, segments) -> out, differentiable in the first three, from a kernel's two halves."""
    @jax.custom_vjp
    def attend(*arguments):
        return forward(*arguments)[0]

    def pull(residuals, cotangent):
        return (*backward(residuals, cotangent), None, None)

    attend.defvjp(forward, pull)
    return attend


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def look_up(table, ids, found, rows, dtype):
    """table[ids] where found, else 0; rows, dtype: the table's. Backward sums repeated ids in float32 or wider."""
    return _look_up_forward(table, ids, found, rows, dtype)[0]


def _look_up_forward(table, ids, found, rows, dtype):
    return jnp.where(found[..., None], table[ids], 0), (ids, found)


def _look_up_backward(rows, dtype, residuals, cotangent):
    ids, found = residuals
    wide = jnp.where(found[..., None], cotangent, 0).astype(local.wide(dtype))
    zeros = match(jnp.zeros((rows, wide.shape[-1]), wide.dtype), wide)
    return zeros.at[ids].add(wide).astype(dtype), None, None


look_up.defvjp(_look_up_forward, _look_up_backward)


class Ctx:
    """What both lowerings share."""

    def __init__(self, run, placements, rows=None):
        self.run, self.placements, self.rows = run, placements, rows
        self.rules = activation_rules(run)
        self.tp = run.mesh.live(("tp",))
        self.keep = False       # of a layer that was just run again keep everything: it goes backward at once
        self.training = True    # noise, drops and losses of routers as in training
        self.watching = False   # tell what every token's router decided

    def bind(self, rows):
        """The same context for another micro-batch's `Rows`."""
        bound = copy(self)
        bound.rows = rows
        return bound

    def full(self, module):
        """`module` with usable weights in place of `Stored` ones: gathered over the axes of ZeRO-3, whole but for tensor parallelism."""
        structure, state = nnx.split(module)
        stored = lambda node: isinstance(node, Stored)
        return nnx.merge(structure, jax.tree.map(lambda node: self.gather_parameter(node) if stored(node) else node, state, is_leaf=stored))

    def spec(self, *labels):
        """PartitionSpec of an activation with these labels, size-1 axes left out."""
        return partition(live(self.rules.spec(labels), self.run.mesh))

    def dropout(self, x, site, layer):
        """Zero a part of x [b, s, H] (at a border) and scale the rest. The mask depends on (seed, step, row, index in the row, layer,
        site) only, so it is the same on every mesh."""
        rate = self.run.model.dropout
        if not rate or self.rows.key is None:
            return x
        index = self.sequence(self.rows.index[None], border=True)[0]
        keep = self.draw_at(index, site, layer, lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[-1:]))
        return jnp.where(keep, x / (1 - rate), 0)

    def draw_at(self, index, site, layer, sample):
        """`sample(key)` of each of this device's rows and of the tokens with these indices in the row: [b, s, ...]. Keys depend on (seed, step, row,
        index, layer, site) only."""
        key = jax.random.fold_in(jax.random.fold_in(self.rows.key, layer), site)
        token_key = lambda row, place: jax.random.fold_in(jax.random.fold_in(key, row), place)
        return jax.vmap(lambda row: jax.vmap(lambda place: sample(token_key(row, place)))(index))(self.rows.number)

    def positions(self, border=False):
        """int32 [b, s] of the tokens at hand: inside a block, or at a border."""
        return self.sequence(self.rows.positions, border)

    def remat(self, layer):
        """`layer(x, stored, number, shared)` with the run's recomputation. Gathered weights are never kept, whatever the choice."""
        kind, policies = self.run.parallel.remat, jax.checkpoint_policies
        if self.keep:
            return layer
        if kind == "full" and self.run.parallel.zero_r and self.tp:
            return self.recompute_from_shard(layer)
        if kind == "selective":
            policy = policies.save_only_these_names({"attention": "attention", "matmuls": "matmul"}[self.run.parallel.remat_save])
        else:
            policy = policies.nothing_saveable if kind == "full" else save_all_but_gathers
        return jax.checkpoint(layer, policy=policy, prevent_cse=False) if kind != "none" or self.gathers() else layer

    def gathers(self):
        """Whether a layer gathers anything that must not be kept for the backward pass."""
        return bool(self.tp and self.run.parallel.tp_sequence) or any(p.axes(3) or p.kv_slice is not None for p in self.placements.values())


def save_all_but_gathers(primitive, *_, **__):
    """Checkpoint policy of remat = none: recompute only what a device holds a piece of anyway, and views of it (the slice of a KV
    weight, a norm's scale broadcast over tokens), which would keep the gathered weight under another name."""
    return primitive.name not in ("all_gather", "all_gather_invariant", "dynamic_slice", "broadcast_in_dim", "optimization_barrier")


class ManualCtx(Ctx):
    """Inside `shard_map`: arrays are one device's pieces."""

    def __init__(self, run, placements, rows=None, platform="cpu"):
        """platform: cpu | tpu | gpu, that the program is for."""
        super().__init__(run, placements, rows)
        self.platform = platform
        # in code in which not all devices of the mesh take part XLA:CPU mixes up the partners of permutes
        self.grouped = divergent(run) and platform == "cpu"
        self.split = split_axes(run) if run.model.moe.experts else ()

    def how(self, name, dtype):
        """`GatherOf` of a parameter, one layer of it if it is stacked. dtype: of its gradient."""
        placement = self.placements[name]
        axes, stacked = placement.axes(3), placement.parameter.stacked
        dim = placement.dim - stacked if axes else None
        kv = None if placement.kv_slice is None else (placement.kv_slice - stacked, self.run.model.kv_heads, self.run.mesh.tp)
        return GatherOf(axes, dim, kv, dtype, name, placement.inner)

    def gather_parameter(self, stored):
        if self.rows is not None and self.rows.tick is not None and self.placements[stored.name].axes(3):
            # a gather that does not depend on the tick would be done once, before them all
            stored = replace(stored, value=lax.optimization_barrier((stored.value, self.rows.tick))[0])
        if isinstance(stored.sink, (Tap, Teller)):
            return Tapped(_gather_forward(lax.stop_gradient(stored.value), None, self.how(stored.name, None))[0], stored.sink)
        return _gather_parameter(stored.value, stored.sink, self.how(stored.name, stored.sink.dtype))

    def scatter_parameter(self, gradient, name, dtype):
        """The piece that this device keeps of the gradient of a gathered weight: what the backward pass of `gather_parameter` does."""
        return _gather_backward(self.how(name, dtype), None, gradient)[1]

    def sequence(self, x, border=False):
        """This device's slots of x [b, S]: of its sp shard, and at a border of its part of that."""
        return self.piece(x, self.run.mesh.live(("sp", "tp") if border and self.run.parallel.tp_sequence else ("sp",)))

    def piece(self, x, axes):
        """This device's part of x [b, S, ...] that is split over `axes`."""
        for axis in axes:
            size = x.shape[1] // getattr(self.run.mesh, axis)
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size, axis=1)
        return x

    def enter(self, x, owner):
        """Border -> inside: *f*, or with tp_sequence an all-gather of the sequence."""
        if self.run.parallel.tp_sequence:
            return gather(x, self.tp, 1, f"tp.enter.{owner}")
        return copy_in(x, self.tp, f"tp.enter.{owner}") if self.tp else x

    def exit(self, x, owner):
        """Inside -> border, summed over tp: *g*, or with tp_sequence a reduce-scatter onto the sequence."""
        if self.run.parallel.tp_sequence:
            return scatter(x, self.tp, 1, f"tp.exit.{owner}")
        return sum_out(x, self.tp, f"tp.exit.{owner}") if self.tp else x

    def embed(self, table, tokens):
        """table: [V_padded/tp, H], tokens: int32 [b, s] -> [b, s, H] at a border."""
        ids = tokens - (lax.axis_index("tp") * table.shape[0] if self.tp else 0)
        found = (ids >= 0) & (ids < table.shape[0])
        return self.exit(look_up(table, jnp.where(found, ids, 0), found, table.shape[0], table.dtype), "embedding")

    def attention(self, query, key, value):
        """[b, s, heads, d] of this device's heads and slots -> the same shape as query."""
        kernel = attention_kernel(self.run, rotate if self.grouped else None)
        return differentiable(*kernel)(query, key, value, self.rows.positions, self.rows.segments)

    def cross_entropy(self, x, weight, targets):
        """Summed loss of this device's tokens; alike on all tp ranks, each of which starts its backward pass with cotangent 1."""
        compute = partial(cross_entropy.loss_and_gradients, vocab=self.run.model.vocab, axes=self.tp, limit=self.run.parallel.loss_chunk)
        return summed_loss(compute)(x, weight, targets)

    def moe(self, feed, x, layer):
        """`MoE` feed of x [b, s, H] at a border -> (the same, summed over tp; its `Load`). The router's tokens lie as inside a block, or with
        moe_tp = tokens as tp splits the sequence: then a border of Megatron-SP needs no transform, another one a slice and an all-gather."""
        if self.run.parallel.moe_tp == "width" or not self.tp:
            out, load = feed(self.enter(x, "moe"), layer, self)
            return self.exit(out, "moe"), load
        if self.run.parallel.tp_sequence:
            return feed(x, layer, self)
        out, load = feed(take_part(x, self.tp, "tp.enter.moe"), layer, self)
        return join_parts(out, self.tp, "tp.exit.moe"), load

    def through_experts(self, x, routed, experts):
        """x: [b, s, H] -> the same, each token through its experts (`jaxpara.transport`)."""
        sizes = layout(self.run, x.shape[0], not self.training, self.rows.index.shape[0])
        flat = lambda array: array.reshape(-1, array.shape[-1])
        out = transport.through_experts(flat(x), flat(routed.expert), flat(routed.gates), experts, sizes, self.platform)
        return out.reshape(x.shape)

    def draw(self, site, layer, sample):
        """`draw_at` for the tokens that this device routes."""
        return self.draw_at(self.piece(self.rows.index[None], self.split)[0], site, layer, sample)

    def share(self, weigh, layer):
        """This device's part of the factor of the routers' losses: tp ranks that route the same tokens share it; padding has none."""
        copies = 1 if "tp" in self.split else self.run.mesh.tp
        return jnp.where(layer >= 0, weigh / copies, 0)

    def row_tokens(self, here):
        """S, of `here` tokens per row on this device."""
        return here * self.run.mesh.sp * (self.run.mesh.tp if "tp" in self.split else 1)

    def spans(self):
        """Whether token groups lie on several devices."""
        return spanning(self.run, self.rows.index.shape[0])

    def whole(self, x, what):
        """x: [b, s, ...] of the tokens that this device routes -> [b, S, ...] of whole rows in their original order."""
        back = inverse(slots(self.run, self.rows.index.shape[0]))
        return gather(x, self.split, 1, f"moe.{what}")[:, back] if self.split else x

    def own(self, x):
        """The inverse of `whole`."""
        return self.piece(x[:, slots(self.run, x.shape[1])], self.split) if self.split else x

    def sum_of_row(self, counts):
        """Over the devices that hold parts of the same rows."""
        return sum_over(counts, self.split, "moe.loads")

    def sum_of_batch(self, counts):
        """Over all devices that route tokens of this micro-batch."""
        return sum_over(counts, self.run.mesh.live(BATCH_AXES) + self.split, "moe.loads")

    def recompute_from_shard(self, layer):
        """ZeRO-R: of a layer's input, which every tp rank holds whole, each keeps 1/tp of the tokens; backward gathers them again."""
        @jax.custom_vjp
        def run(x, stored, number, shared):
            return layer(x, stored, number, shared)

        def keep(x, *rest):
            size = x.shape[1] // self.run.mesh.tp
            shard = lax.dynamic_slice_in_dim(vary(x, self.tp), lax.axis_index("tp") * size, size, axis=1)
            return layer(x, *rest), (shard, *rest)      # of what a layer tells of its router nothing goes backward

        def pull(residuals, cotangent):
            shard, stored, number, shared = residuals
            with jax.named_scope("zero_r"):
                x = lax.all_gather(shard, self.tp, axis=1, tiled=True, to="invarying")
            _, pullback = jax.vjp(lambda x, stored: layer(x, stored, number, shared)[0], x, stored)
            return (*pullback(cotangent[0]), None, None)

        run.defvjp(keep, pull)
        return run


def summed_loss(compute):
    """Differentiable summed loss from a function that gives loss and gradients in one pass."""
    @jax.custom_vjp
    def loss(x, weight, targets):
        return compute(x, weight, targets, gradients=False)[0]

    def keep(x, weight, targets):
        value, dx, dweight = compute(x, weight, targets, gradients=True)
        return value, (dx, dweight.astype(weight.dtype))

    def pull(residuals, cotangent):
        return (*((cotangent * gradient).astype(gradient.dtype) for gradient in residuals), None)

    loss.defvjp(keep, pull)
    return loss


class GatherOf(NamedTuple):
    """How a parameter of ZeRO-3 is gathered, and its gradient scattered."""
    axes: tuple
    dim: int | None
    kv: tuple | None        # (dim, heads, tp) to use only the rank's own KV head
    dtype: Any              # of the gradient
    name: str
    inner: int | None       # see `scatter_in_steps`


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gather_parameter(value, sink, how):
    """All-gather over the ZeRO-3 axes / reduce-scatter in the sink's dtype."""
    return _gather_forward(value, sink, how)[0]


def _gather_forward(value, sink, how):
    # not by calling the function above: a checkpoint policy must see the all-gather itself, not a call that hides it
    if how.kv is not None:
        kv_dim, heads, tp = how.kv
        value = lax.dynamic_slice_in_dim(value, lax.axis_index("tp") * heads // tp, 1, axis=kv_dim)
    return gather(value, how.axes, how.dim, f"zero3.gather.{how.name}"), None


def _gather_backward(how, _, cotangent):
    gradient = scatter_in_steps(cotangent.astype(how.dtype), how.axes, how.dim, f"zero3.scatter.{how.name}", how.inner)
    if how.kv is not None:
        kv_dim, heads, tp = how.kv
        shape = (*gradient.shape[:kv_dim], heads, *gradient.shape[kv_dim + 1:])
        gradient = lax.dynamic_update_slice_in_dim(match(jnp.zeros(shape, how.dtype), gradient), gradient,
                                                   lax.axis_index("tp") * heads // tp, axis=kv_dim)
    return None, gradient


_gather_parameter.defvjp(_gather_forward, _gather_backward)


class AnnotatedCtx(Ctx):
    """Under `jit` over the whole mesh: arrays are global, constraints say where they lie."""

    def __init__(self, run, placements, mesh, rows=None):
        super().__init__(run, placements, rows)
        self.mesh = mesh

    def constrain(self, x, *labels):
        return lax.with_sharding_constraint(x, jax.NamedSharding(self.mesh, self.spec(*labels)))

    def on_shards(self, function, inputs, outputs):
        return jax.shard_map(function, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=self.run.parallel.check_vma)

    def gather_parameter(self, stored):
        placement = self.placements[stored.name]
        strip = slice(1, None) if placement.parameter.stacked else slice(None)
        place = lambda spec: jax.NamedSharding(self.mesh, partition(spec[strip]))
        return _place_parameter(stored.value, stored.sink, place(placement.base), place(placement.storage), stored.sink.dtype)

    def sequence(self, x, border=False):
        return x

    def enter(self, x, owner):
        return self.constrain(x, "batch", "sequence", "width")

    def exit(self, x, owner):
        return self.constrain(x, "batch", "border", "width")

    def embed(self, table, tokens):
        return self.exit(look_up(table, tokens, jnp.ones(tokens.shape, bool), table.shape[0], table.dtype), "embedding")

    def attention(self, query, key, value):
        kernel, mesh, kv_heads = attention_kernel(self.run), self.run.mesh, self.run.model.kv_heads
        copied = kv_heads < mesh.tp
        heads, keys = self.spec("batch", "sequence", "heads"), self.spec("batch", "sequence", "kv_heads")
        rows, per_head = self.spec("batch", "row"), self.spec("batch", "sequence", "heads", "head_dim")
        own = lambda: lax.axis_index("tp") * kv_heads // mesh.tp

        def forward(query, key, value, positions, segments):
            if copied:
                key, value = (lax.dynamic_slice_in_dim(x, own(), 1, axis=2) for x in (key, value))
            return kernel.forward(query, key, value, positions, segments)

        def backward(residuals, cotangent):
            dq, dk, dv = kernel.backward(residuals, cotangent)
            if copied:
                spread = lambda x: jnp.concatenate([jnp.where(own() == head, x, 0) for head in range(kv_heads)], axis=2)
                dk, dv = (sum_over(spread(x), ("tp",), "kv.copies") for x in (dk, dv))
            return dq, dk, dv

        # q, k, v, out are [b, s, heads, d], lse is [b, heads, s, group]; how long s is and how many heads is the kernel's own business
        residuals = (per_head, per_head, per_head, rows, rows, per_head, self.spec("batch", "heads", "sequence"))
        forward = self.on_shards(forward, (heads, keys, keys, rows, rows), (heads, residuals))
        backward = self.on_shards(backward, (residuals, heads), (heads, keys, keys))
        return differentiable(forward, backward)(query, key, value, self.rows.positions, self.rows.segments)

    def cross_entropy(self, x, weight, targets):
        """Summed loss over the whole mesh."""
        mesh, whole, table, tokens = self.run.mesh, self.spec("batch", "sequence"), self.spec("vocab"), self.spec("batch", "sequence")
        replicas = mesh.live(("dp", "fsdp", "ep", "sp"))
        compute = partial(cross_entropy.loss_and_gradients, vocab=self.run.model.vocab, axes=self.tp, limit=self.run.parallel.loss_chunk)

        def on_shard(x, weight, targets, gradients):
            loss, dx, dweight = compute(x, vary(weight, replicas), targets, gradients=gradients)
            loss = sum_over(loss, replicas, "loss.total")
            return (loss, sum_over(dx, self.tp, "loss.enter"), sum_over(dweight, replicas, "loss.weight")) if gradients else (loss,)

        def compute_global(x, weight, targets, gradients):
            outputs = (partition(()), whole, table) if gradients else (partition(()),)
            return self.on_shards(partial(on_shard, gradients=gradients), (whole, table, tokens), outputs)(x, weight, targets)

        return summed_loss(compute_global)(x, weight, targets)

    def recompute_from_shard(self, layer):
        """ZeRO-R by constraint: what is kept lies over tp, what is used is whole."""
        shard = jax.NamedSharding(self.mesh, partition(live((("dp", "fsdp", "ep"), ("sp", "tp"), ()), self.run.mesh)))
        gathered = lambda x, *rest: layer(self.exit(x, "zero_r"), *rest)
        kept = jax.checkpoint(gathered, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False)
        return lambda x, *rest: kept(lax.with_sharding_constraint(x, shard), *rest)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _place_parameter(value, sink, base, storage, dtype):
    """The annotated twin of `_gather_parameter`: constraints in place of collectives."""
    return lax.with_sharding_constraint(value, base)


_place_parameter.defvjp(
    lambda value, sink, base, storage, dtype: (lax.with_sharding_constraint(value, base), None),
    lambda base, storage, dtype, _, cotangent: (None, lax.with_sharding_constraint(cotangent.astype(dtype), storage)))
