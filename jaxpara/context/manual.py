"""The manual lowering: the model on one device's pieces inside a single `shard_map`, every collective ours."""
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpara.collectives import copy_in, gather, match, rotate, scatter, scatter_in_steps, sum_out, vary
from jaxpara.context.base import Ctx, attention_kernel, differentiable, look_up, summed_loss
from jaxpara.context.routing import Routing
from jaxpara.kernels import cross_entropy
from jaxpara.pipeline.placing import divergent
from jaxpara.taps import Tap, Tapped, Teller


class ManualCtx(Routing, Ctx):
    """Inside `shard_map`: arrays are one device's pieces."""

    def __init__(self, run, placements, rows=None, platform="cpu"):
        """platform: cpu | tpu | gpu, that the program is for."""
        super().__init__(run, placements, rows)
        self.platform = platform
        # in code in which not all devices of the mesh take part XLA:CPU mixes up the partners of permutes
        self.grouped = divergent(run) and platform == "cpu"

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
