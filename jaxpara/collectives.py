"""Collectives by what they do in forward / backward, each in a named scope that shows in the compiled program.

Inside `shard_map` values are *varying* over a mesh axis (each device its own) or *invariant* (all alike). The checked mode
(`check_vma`) types them; the unchecked one does not, and there `psum` would transpose to another `psum`. So every pair whose
backward is not the plain transpose is a `custom_vjp`, correct in both modes.

All take `axes`, a tuple of mesh axes with more than one device; with an empty tuple they are the identity and emit nothing.
"""
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxpara.zero import scatter_steps


def varying_axes(x):
    """Axes over which `x` (an array, or its abstract shape) is typed varying; empty in the unchecked mode."""
    kind = x.manual_axis_type if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x).manual_axis_type
    return kind.varying if kind is not None else frozenset()


def vary(x, axes):
    """Cast to varying over `axes` (no communication). Its transpose is a psum, so never differentiate through it by accident."""
    missing = tuple(axis for axis in axes if axis not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def match(x, *others):
    """Cast `x` to vary over every axis that one of `others` varies over: the type a loop carry needs from the start."""
    axes = sorted(set().union(*(varying_axes(other) for other in others)))
    return jax.tree.map(lambda leaf: vary(leaf, axes), x)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def copy_in(x, axes, scope):
    """*f* of Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053): identity / all-reduce."""
    return vary(x, axes)


def _copy_in_forward(x, axes, scope):
    return vary(x, axes), None


def _copy_in_backward(axes, scope, _, cotangent):
    return (sum_over(cotangent, axes, scope),)


copy_in.defvjp(_copy_in_forward, _copy_in_backward)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def sum_out(x, axes, scope):
    """*g* of Megatron-LM: all-reduce / identity."""
    return sum_over(x, axes, scope)


def _sum_out_forward(x, axes, scope):
    return sum_over(x, axes, scope), None


def _sum_out_backward(axes, scope, _, cotangent):
    return (vary(cotangent, axes),)


sum_out.defvjp(_sum_out_forward, _sum_out_backward)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def take_part(x, axes, scope):
    """This rank's part of dim 1 of what all ranks of `axes` hold / all-gather of the parts' cotangents."""
    return _part(vary(x, axes), axes)


def _part(x, axes):
    size = x.shape[1] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, axis=1)


def _join(x, axes, scope):
    with jax.named_scope(scope):
        return lax.all_gather(x, axes, axis=1, tiled=True, to="invarying")


take_part.defvjp(lambda x, axes, scope: (take_part(x, axes, scope), None), lambda axes, scope, _, cotangent: (_join(cotangent, axes, scope),))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def join_parts(x, axes, scope):
    """The inverse of `take_part`: all-gather along dim 1 / this rank's part of the cotangent."""
    return _join(x, axes, scope)


join_parts.defvjp(lambda x, axes, scope: (_join(x, axes, scope), None), lambda axes, scope, _, cotangent: (_part(vary(cotangent, axes), axes),))


def sum_over(x, axes, scope):
    """All-reduce, not to be differentiated."""
    if not axes:
        return x
    with jax.named_scope(scope):
        return lax.psum(x, axes)


def max_over(x, axes, scope):
    """All-reduce with maximum, not to be differentiated."""
    if not axes:
        return x
    with jax.named_scope(scope):
        return lax.pmax(x, axes)


def gather(x, axes, dim, scope):
    """All-gather along `dim` / reduce-scatter (the plain transpose, the same in both modes)."""
    if not axes:
        return x
    with jax.named_scope(scope):
        return lax.all_gather(x, axes, axis=dim, tiled=True)


def scatter(x, axes, dim, scope):
    """Reduce-scatter along `dim` / all-gather."""
    if not axes:
        return x
    with jax.named_scope(scope):
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)


def scatter_in_steps(x, axes, dim, scope, inner):
    """Reduce-scatter that over a single axis of more than `inner` devices goes in two steps: among every inner-th device, then among `inner`
    neighbours. The same pieces on the same devices for the same bytes; not to be differentiated.

    XLA:TPU makes an all-reduce of a reduce-scatter whose group spans a whole slice, for twice the bytes, but not of two smaller ones.
    """
    n = lax.axis_size(axes) if axes else 1
    if len(scatter_steps(n, axes, inner)) == 1:
        return scatter(x, axes, dim, scope)
    strided = [list(range(first, n, inner)) for first in range(inner)]
    neighbours = [list(range(first, first + inner)) for first in range(0, n, inner)]
    with jax.named_scope(scope):
        for groups in (strided, neighbours):
            x = lax.psum_scatter(x, axes[0], scatter_dimension=dim, axis_index_groups=groups, tiled=True)
        return x


def exchange(x, axis, split, concat, scope, groups=None):
    """All-to-all: dim `split` is dealt out over the group, dim `concat` is collected from it. Backward: the reverse exchange."""
    with jax.named_scope(scope):
        return lax.all_to_all(x, axis, split_axis=split % x.ndim, concat_axis=concat % x.ndim, axis_index_groups=groups, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def exchange_ragged(x, counts, axis, rows, back, scope):
    """All-to-all of pieces of any size: x holds a piece for each rank, one after the other; what arrives lies in the order of the senders, in `rows`
    rows, zeros at the end. counts: int32 [n, n], rows that rank i sends to rank j. back: the way back, from j to i. Backward: the other way.

    TPU and GPU only: XLA:CPU has no such operation.
    """
    return _exchange_ragged(x, counts, axis, rows, back, scope)


def _exchange_ragged(x, counts, axis, rows, back, scope):
    rank = lax.axis_index(axis)
    before = lambda dim: jnp.cumsum(counts, dim) - counts
    sent, came = before(1)[rank], before(0)[rank]                   # where the pieces for others lie here, and where they land there
    took, home = before(0)[:, rank], before(1)[:, rank]
    to, fro = counts[rank], counts[:, rank]
    offsets = (took, fro, home, to) if back else (sent, to, came, fro)
    out = match(jnp.zeros((rows, *x.shape[1:]), x.dtype), x, counts)
    with jax.named_scope(scope):
        return lax.ragged_all_to_all(x, out, *offsets, axis_name=axis)


def _exchange_ragged_forward(x, counts, *how):
    return _exchange_ragged(x, counts, *how), (counts, x.shape[0])


def _exchange_ragged_backward(axis, rows, back, scope, residuals, cotangent):
    counts, before = residuals
    return _exchange_ragged(cotangent, counts, axis, before, not back, scope), None


exchange_ragged.defvjp(_exchange_ragged_forward, _exchange_ragged_backward)


def shift(tree, axis, pairs, scope):
    """Point-to-point: every leaf travels along `pairs` of (source, destination) ranks of `axis`."""
    with jax.named_scope(scope):
        return jax.tree.map(lambda leaf: lax.ppermute(leaf, axis, pairs), tree)


def rotate(tree, axis, pairs, scope):
    """What `shift` does, by an all-gather from which each device takes its source's piece: for code that only some groups of `axis` run at one
    time. In such code XLA:CPU gives permutes to the wrong partners, and groups are safe. Sends n - 1 times as much."""
    source = dict((target, source) for source, target in pairs)
    sources = jnp.asarray([source[rank] for rank in range(len(pairs))])
    with jax.named_scope(scope):
        return jax.tree.map(lambda leaf: lax.all_gather(leaf, axis)[sources[lax.axis_index(axis)]], tree)


def recomputed(function):
    """`function`, of which autodiff keeps the arguments only: the backward pass computes the rest again, whatever checkpoint policy is
    around it."""
    @jax.custom_vjp
    def run(*arguments):
        return function(*arguments)

    def keep(*arguments):
        return function(*arguments), arguments

    def pull(arguments, cotangent):
        return jax.vjp(function, *arguments)[1](cotangent)

    run.defvjp(keep, pull)
    return run
