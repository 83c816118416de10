"""From routing decisions to buffers sorted by expert, and back: plans of integers, and moves that are gathers in both directions.

A choice is one (token, k); it goes to one row of a buffer or nowhere. A plan holds both maps, rows -> choices and choices -> rows, so that the
backward pass of a gather is the gather by the other map and nothing is ever scattered.
"""
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpara.kernels import local

NOWHERE = -1


class Plan(NamedTuple):
    row: jax.Array          # int32 [n, K]: of each choice; -1: dropped, or not for this buffer
    choice: jax.Array       # int32 [rows]: token·K + k in each row; -1: none
    sizes: jax.Array        # int32 [E]: rows that each expert has


class Sorted(NamedTuple):
    """Flat choices sorted by expert; those that go nowhere come last."""
    order: jax.Array        # int32 [N]: the choice at each place
    place: jax.Array        # int32 [N]: of each choice
    begin: jax.Array        # int32 [E + 1]: each expert's first place, and the end


def by_expert(expert, experts):
    """`Sorted` of int32 [N] expert ids, -1: nowhere. Stable: choices keep their order."""
    key = jnp.where(expert < 0, experts, expert)
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    place = jnp.argsort(order).astype(jnp.int32)
    begin = jnp.searchsorted(key[order], jnp.arange(experts + 1), method="compare_all").astype(jnp.int32)
    return Sorted(order, place, begin)


def in_cells(expert, experts, cells, size):
    """`Plan` for `cells` cells of `size` rows, each of experts/cells experts in order; a cell must hold what comes. expert: int32 [n, K]."""
    flat = expert.reshape(-1)
    found = by_expert(flat, experts)
    each = experts // cells
    begin = found.begin[::each]                                  # of each cell, and the end
    cell = jnp.maximum(flat, 0) // each
    row = jnp.where(flat < 0, NOWHERE, cell * size + found.place - begin[cell])
    cell, within = np.divmod(np.arange(cells * size, dtype=np.int32), size)
    return Plan(row.reshape(expert.shape), _choices(found, begin[cell] + within, begin[cell + 1]), jnp.diff(found.begin))


def packed(expert, experts, rows, block):
    """`Plan` for one buffer in which each expert's rows follow the last one's, from a multiple of `block` on; `rows` in all, a multiple of it."""
    flat = expert.reshape(-1)
    found = by_expert(flat, experts)
    sizes = jnp.diff(found.begin)
    start = starts(sizes, block)
    at = jnp.maximum(flat, 0)
    row = jnp.where(flat < 0, NOWHERE, start[at] + found.place - found.begin[at])
    places = jnp.arange(rows, dtype=jnp.int32)
    owner = jnp.searchsorted(start[1:], places, side="right", method="compare_all")
    safe = jnp.minimum(owner, experts - 1)
    end = jnp.where(owner < experts, found.begin[safe + 1], 0)
    return Plan(row.reshape(expert.shape), _choices(found, found.begin[safe] + places - start[safe], end), sizes)


def regrouped(counts, begins, rows_in, rows_out, block):
    """`Plan` that sorts by expert what came from several devices. counts: int32 [devices, E here] rows of each; begins: [devices] where each one's
    rows begin, among rows_in; there they are sorted by expert. One choice per row that came."""
    devices, experts = counts.shape
    ends = jnp.cumsum(counts, axis=1)
    places = jnp.arange(rows_in, dtype=jnp.int32)
    device = jnp.searchsorted(begins, places, side="right", method="compare_all") - 1
    within = places - begins[device]
    expert = (within[:, None] >= ends[device]).sum(-1)
    return packed(jnp.where(expert < experts, expert, NOWHERE)[:, None], experts, rows_out, block)


def starts(sizes, block):
    """int32 [E + 1]: first row of each expert, aligned, and the end."""
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(-(-sizes // block) * block).astype(jnp.int32)])


def _choices(found, place, end):
    """The choice at each place of the sorted list that is before `end`; -1 from there on."""
    last = found.order.shape[0] - 1
    return jnp.where(place < end, found.order[jnp.minimum(place, last)], NOWHERE)


def _take(x, index):
    """x[index], zeros where index is -1."""
    return jnp.where((index >= 0)[:, None], x[jnp.maximum(index, 0)], jnp.zeros((), x.dtype))


@jax.custom_vjp
def spread(x, plan):
    """x: [n, H] tokens -> [rows, H]: each row its choice's token, zeros where there is none. Backward: the sum over each token's rows."""
    return _spread(x, plan)[0]


def _spread(x, plan):
    k = plan.row.shape[1]
    return _take(x, jnp.where(plan.choice >= 0, plan.choice // k, NOWHERE)), plan


def _spread_back(plan, cotangent):
    return _total(plan, lambda row, k: _take(cotangent, row)).astype(cotangent.dtype), None


def _total(plan, of):
    """Sum over k of `of(rows of the k-th choices, k)`, in float32 or wider, one k at a time: no [n, K, H] exists."""
    k = plan.row.shape[1]
    wide = lambda x: x.astype(local.wide(x.dtype))
    if k <= 8:
        return sum(wide(of(plan.row[:, i], i)) for i in range(k))
    first = wide(of(plan.row[:, 0], 0))
    add = lambda i, total: total + wide(of(jax.lax.dynamic_index_in_dim(plan.row, i, 1, keepdims=False), i))
    return jax.lax.fori_loop(1, k, add, first)


spread.defvjp(_spread, _spread_back)


@jax.custom_vjp
def combine(rows, gates, plan):
    """rows: [rows, H], gates: [n, K] in float32 or wider -> [n, H]: each token's rows, weighed and summed. A choice without a row counts nothing."""
    return _combine(rows, gates, plan)[0]


def _combine(rows, gates, plan):
    gate = lambda k: jax.lax.dynamic_index_in_dim(gates, k, 1)
    return _total(plan, lambda row, k: gate(k) * _take(rows, row)).astype(rows.dtype), (rows, gates, plan)


def _combine_back(residuals, cotangent):
    rows, gates, plan = residuals
    k = gates.shape[1]
    wide = cotangent.astype(gates.dtype)
    weights = _take(gates.reshape(-1, 1), plan.choice)
    drows = weights * _take(wide, jnp.where(plan.choice >= 0, plan.choice // k, NOWHERE))
    dgates = jax.lax.map(lambda row: (wide * _take(rows, row)).sum(-1), plan.row.T).T
    return drows.astype(rows.dtype), dgates.astype(gates.dtype), None


combine.defvjp(_combine, _combine_back)


@jax.custom_vjp
def move(x, to, back):
    """x[to], zeros where -1. back: the inverse map, by which the cotangent is taken."""
    return _take(x, to)


move.defvjp(lambda x, to, back: (_take(x, to), back), lambda back, cotangent: (_take(cotangent, back), None, None))


def reference(x, gates, expert, function):
    """[n, H] the slow way: `function(expert, token)` of every choice that is not -1, weighed and summed. For tests."""
    out = np.zeros_like(x)
    for token, k in np.argwhere(np.asarray(expert) >= 0):
        out[token] += gates[token, k] * function(expert[token, k], x[token])
    return out
