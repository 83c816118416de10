"""What both executors share: one chunk of layers, and the loss spread over the stages.

The head is the work of all stages: each takes 1/p of the tokens that leave the last one (`deal`), and the gradients go back
(`collect`). The embedding, a look-up, is done by every stage at the same time, which takes no longer than if one did it and sends nothing.
"""
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpara.collectives import exchange, gather, scatter_in_steps, vary, varying_axes
from jaxpara.context import Stored
from jaxpara.gradients import reduce_micro, rows_of
from jaxpara.model.declare import fill
from jaxpara.params import period


class Stage:
    """One device's part of a pipeline. run, placements, model: the whole model's; ctx: a `ManualCtx` without rows; table: the `Schedule`; again:
    whether the backward pass runs a chunk again from its input."""

    def __init__(self, run, placements, model, ctx, table, again):
        self.run, self.placements, self.model, self.ctx, self.table = run, placements, model, ctx, table
        stack = next(p.stack for p in placements.values() if p.parameter.stacked)
        self.length, self.padded = stack.length, stack.padded
        ctx.keep = again and stack.length == period(run.model)
        self.numbers = np.asarray(stack.rows, np.int32).reshape(run.mesh.pp, stack.chunks, stack.length)
        self.last = table.placement[-1]
        self.layers = tuple(name for name, p in placements.items() if p.parameter.stacked)
        self.outside = tuple(name for name in placements if name not in self.layers)
        self.entry = tuple(name for name in self.outside if name.startswith("embedding."))
        self.exit = tuple(name for name in self.outside if name not in self.entry or name == "embedding.tokens" and run.model.tied)

    @property
    def rank(self):
        return lax.axis_index("pp")

    def rows(self, batch, index, moment, tick=None):
        """`Rows` of micro-batch `index`."""
        micro = {name: lax.dynamic_index_in_dim(array, index, keepdims=False) for name, array in batch.items()}
        return rows_of(micro, self.run, moment)._replace(tick=tick)

    def chunk_of(self, arrays, chunk):
        """The rows of one of this stage's chunks, of {name: stacked array}."""
        if self.numbers.shape[1] == 1:
            return {name: arrays[name] for name in self.layers}
        cut = lambda name: lax.dynamic_slice_in_dim(arrays[name], chunk * self.length_of(name), self.length_of(name))
        return {name: cut(name) for name in self.layers}

    def length_of(self, name):
        """Rows of a parameter in one chunk: of its layers those that have it."""
        return self.placements[name].stack.length

    def through(self, x, weights, sinks, chunk, rows):
        """x: [b, s, H] at a border, through chunk number `chunk` of this stage, whose {name: rows} are in weights and sinks. Returns x and, of a
        model with experts, `Load`s."""
        stored = {name: Stored(weights[name], sinks[name], name) for name in self.layers}
        numbers = jnp.asarray(self.numbers)[self.rank, chunk]
        return fill(self.model, stored).blocks(x, numbers, self.ctx.bind(rows), self.padded)

    def ends(self, weights, sinks):
        """The model with those of its embedding, final norm and head that have a sink; its layers are not at hand."""
        stored = {name: Stored(weights[name], sink, name) for name, sink in sinks.items() if name in self.outside}
        return fill(self.model, stored)

    def loss(self, x, targets, weights, sinks):
        """Summed loss of this stage's part of the tokens. x: [..., s, H] at a border, the last stage's counts; targets: int32 [..., s]."""
        return self.ends(weights, sinks).end(self.part(x), self.part_of_targets(targets), self.ctx)

    def part(self, x):
        """[..., s, H] at a border -> [1, n, H]: this stage's part of what the last chunk's stage has, filled up with zeros."""
        flat, p = x.reshape(-1, x.shape[-1]), self.run.mesh.pp
        flat = jnp.pad(flat, ((0, -flat.shape[0] % p), (0, 0)))
        return deal(flat.reshape(p, -1, x.shape[-1]), self.last)

    def part_of_targets(self, targets):
        """int32 [..., s] inside a block -> [1, n·tp]: those of the tokens that `part` deals this stage, as `enter` orders them."""
        p, tp = self.run.mesh.pp, self.run.mesh.tp if self.run.parallel.tp_sequence else 1
        by_rank = jnp.moveaxis(targets.reshape(-1, tp, targets.shape[-1] // tp), 1, 0).reshape(tp, -1)
        by_rank = jnp.pad(by_rank, ((0, 0), (0, -by_rank.shape[1] % p)), constant_values=-1).reshape(tp, p, -1)
        return lax.dynamic_index_in_dim(by_rank, self.rank, axis=1).reshape(1, -1)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def deal(x, source):
    """x: [p, n, H] of stage `source` -> [1, n, H], one part per stage / the parts' gradients back to that stage."""
    return exchange(x, "pp", 0, 0, "border.deal")[source][None]


def _deal_forward(x, source):
    return deal(x, source), None


def _deal_backward(source, _, cotangent):
    return (collect(cotangent, source),)


deal.defvjp(_deal_forward, _deal_backward)


def collect(part, source):
    """[1, n, H] of each stage -> [p, n, H] on stage `source`, zeros elsewhere."""
    whole = gather(part, ("pp",), 0, "border.collect")
    return jnp.where(lax.axis_index("pp") == source, whole, 0)


def sums(value, placement, dtype):
    """Zeros for what `reduce_micro` leaves of a parameter's gradient; value: as the ticks have it."""
    shape = list(value.shape)
    if placement.axes(2):
        shape[placement.dim] //= lax.axis_size(placement.axes(2))
    return vary(jnp.zeros(shape, dtype), varying_axes(value))


def inside(run, placements):
    """The placements as the ticks see them: with `gather_once` the weights of ZeRO-3 are whole there, and their gradients local."""
    if not run.parallel.gather_once:
        return placements
    return {name: replace(p, stages=dict.fromkeys(p.stages, 0)) if p.axes(3) else p for name, p in placements.items()}


def gathered(weights, placements):
    """The weights of ZeRO-3 whole, for `gather_once`."""
    return {name: gather(value, placements[name].axes(3), placements[name].dim, f"zero3.gather.{name}") for name, value in weights.items()}


def scattered(gradients, placements):
    """The local gradients of those weights, summed into what each device keeps of them, once per step."""
    def one(gradient, p):
        gradient = scatter_in_steps(gradient, p.axes(3), p.dim, f"zero3.scatter.{p.name}", p.inner)
        return reduce_micro(gradient, p)
    return {name: one(gradient, placements[name]) if placements[name].axes(3) else gradient for name, gradient in gradients.items()}
