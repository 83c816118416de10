"""What both lowerings share: what a layer is told, attention by kernels, the recompute policies."""
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpara.checks import ring_degree, ulysses_degree
from jaxpara.collectives import match
from jaxpara.kernels import local, ring, ulysses
from jaxpara.mesh import partition
from jaxpara.rules import activation_rules, live


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
    tick: jax.Array | None = None   # in a loop whose every pass is to gather the weights of ZeRO-3 anew, something that differs from pass to pass
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

    def rows_alone(self):
        """`rows` for layers that no loop runs over: what they gather is tied to the micro-batch, or compilers would do it once, before all."""
        tied = self.run.mesh.pp == 1 and self.run.train.microbatches > 1 and self.rows.tick is None
        return self.rows._replace(tick=self.rows.positions) if tied else self.rows

    def remat(self, layer, alone=False):
        """`layer(x, stored, number, shared)` with the run's recomputation. Gathered weights are never kept, whatever the choice. alone: no loop
        stands around the layer, so that compilers could take the second run for the first."""
        kind, policies = self.run.parallel.remat, jax.checkpoint_policies
        if self.keep:
            return layer
        if kind == "full" and self.run.parallel.zero_r and self.tp:
            return self.recompute_from_shard(layer)
        if kind == "selective":
            policy = policies.save_only_these_names({"attention": "attention", "matmuls": "matmul"}[self.run.parallel.remat_save])
        else:
            policy = policies.nothing_saveable if kind == "full" else save_all_but_gathers
        return jax.checkpoint(layer, policy=policy, prevent_cse=alone) if kind != "none" or self.gathers() else layer

    def gathers(self):
        """Whether a layer gathers anything that must not be kept for the backward pass."""
        return bool(self.tp and self.run.parallel.tp_sequence) or any(p.axes(3) or p.kv_slice is not None for p in self.placements.values())


def save_all_but_gathers(primitive, *_, **__):
    """Checkpoint policy of remat = none: recompute only what a device holds a piece of anyway, and views of it (the slice of a KV
    weight, a norm's scale broadcast over tokens), which would keep the gathered weight under another name."""
    return primitive.name not in ("all_gather", "all_gather_invariant", "dynamic_slice", "broadcast_in_dim", "optimization_barrier")


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
