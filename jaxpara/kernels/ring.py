"""Attention over a sequence split on one mesh axis: ring, all-gather of keys and values, and no split at all.

Ring: keys and values travel, each device merges what its queries see of every chunk (Liu et al. 2023, arXiv 2310.01889).
The backward pass is its own ring: it recomputes probabilities from the merged lse while K, V and the growing dK, dV travel.

Sends per device, for a ring of n and this device's [b, S/n, N_kv, d] keys: forward K and V, n-1 hops. Backward K and V again,
n-1 hops, and dK, dV in float32 (so their error does not grow with the ring), n hops: the last brings them home.
Positions and document ids do not travel: every device has those of the whole row.
"""
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxpara.collectives import gather, match, scatter, shift
from jaxpara.kernels import Kernel, local


def _at(positions, segments, start, length):
    """(positions, segments) of `length` slots from `start`."""
    return tuple(lax.dynamic_slice_in_dim(x, start, length, axis=1) for x in (positions, segments))


def kept(query, key, value, positions, segments, out, lse):
    """(out, residuals) of a forward pass; out and lse are named for the recompute policy that keeps attention."""
    out = checkpoint_name(local.ungrouped(out.astype(query.dtype)), "attention")
    return out, (query, key, value, positions, segments, out, checkpoint_name(lse, "attention"))


class Pull:
    """What every backward pass derives from its residuals: the grouped arrays, delta, and the way back."""

    def __init__(self, query, key, out, cotangent):
        split = lambda x: local.grouped(x, key.shape[2])
        self.dtype, self.query, self.cotangent = query.dtype, split(query), split(cotangent)
        self.delta = local.row_sum(split(out), self.cotangent)

    def back(self, dq, dk, dv):
        """Wide gradients in kernel layout -> (dq, dk, dv) as the model has q, k, v."""
        return local.ungrouped(dq).astype(self.dtype), local.heads_first(dk).astype(self.dtype), local.heads_first(dv).astype(self.dtype)


def whole(window=None, limit=local.BLOCK):
    """Kernel for a device that holds whole sequences."""
    def forward(query, key, value, positions, segments):
        at = (positions, segments)
        out, lse = local.forward(local.grouped(query, key.shape[2]), local.heads_first(key), local.heads_first(value), at, at, window, limit)
        return kept(query, key, value, positions, segments, out, lse)

    def backward(residuals, cotangent):
        query, key, value, positions, segments, out, lse = residuals
        at, pull = (positions, segments), Pull(query, key, out, cotangent)
        return pull.back(*local.backward(pull.query, local.heads_first(key), local.heads_first(value), at, at, lse,
                                         pull.cotangent, pull.delta, window, limit))

    return Kernel(forward, backward)


def ring(axis, n, inner=1, window=None, limit=local.BLOCK, move=None):
    """Kernel for a ring of `n` devices on mesh axis `axis`; with `inner` > 1, of every inner-th device (hybrid). move: how it sends, if not by
    `shift`."""
    pairs = [(g * inner + j, (g + 1) % n * inner + j) for g in range(n) for j in range(inner)]
    move = move or shift

    def view(positions, segments, length):
        """(this device's place in the ring, its queries' place in the row, a function hop -> the visiting keys' place)."""
        rank = lax.axis_index(axis) // inner
        return rank, _at(positions, segments, rank * length, length), lambda hop: _at(positions, segments, (rank - hop) % n * length, length)

    def half(length):
        return min(limit, max(length // 2, 1))      # two blocks at least: under the zigzag order one of them is skipped

    def forward(query, key, value, positions, segments):
        length, grouped = query.shape[1], local.grouped(query, key.shape[2])
        rank, query_at, key_at = view(positions, segments, length)

        def see(state, key, value, hop):
            return local.merge(state, local.forward(grouped, key, value, query_at, key_at(hop), window, half(length)))

        def one_hop(carry, hop):
            state, key, value = carry
            following = move((key, value), axis, pairs, "ring.forward")
            return (see(state, key, value, hop), *following), None

        acc = local.wide(query.dtype)
        empty = (jnp.zeros(grouped.shape, acc), jnp.full(grouped.shape[:-1], -jnp.inf, acc))
        first = match((local.heads_first(key), local.heads_first(value)), key, value, rank)
        (state, last_key, last_value), _ = lax.scan(one_hop, (match(empty, query, key, value, *query_at), *first), jnp.arange(n - 1))
        return kept(query, key, value, positions, segments, *see(state, last_key, last_value, n - 1))

    def backward(residuals, cotangent):
        query, key, value, positions, segments, out, lse = residuals
        length, pull = query.shape[1], Pull(query, key, out, cotangent)
        rank, query_at, key_at = view(positions, segments, length)

        def see(grads, key, value, hop):
            parts = local.backward(pull.query, key, value, query_at, key_at(hop), lse, pull.cotangent, pull.delta, window, half(length))
            return tuple(total + part for total, part in zip(grads, parts))

        def one_hop(carry, hop):
            grads, key, value = carry
            following = move((key, value), axis, pairs, "ring.backward")
            dq, dk, dv = see(grads, key, value, hop)
            return ((dq, *move((dk, dv), axis, pairs, "ring.gradient")), *following), None

        first = match((local.heads_first(key), local.heads_first(value)), key, value, rank)
        zeros = tuple(jnp.zeros(x.shape, local.wide(query.dtype)) for x in (pull.query, *first))
        (grads, last_key, last_value), _ = lax.scan(one_hop, (match(zeros, query, key, value, cotangent, *query_at), *first), jnp.arange(n - 1))
        dq, dk, dv = see(grads, last_key, last_value, n - 1)
        return pull.back(dq, *move((dk, dv), axis, pairs, "ring.gradient"))

    return Kernel(forward, backward)


def allgather(axis, window=None, limit=local.BLOCK):
    """Kernel that gathers all keys and values over `axis`; dK, dV come back through a reduce-scatter in float32.

    Sends per device 2·(n-1)/n·b·S·N_kv·d elements forward, as much again in backward, and dK, dV. Nothing gathered is kept.
    """
    def view(key, value, positions, segments, scope):
        """(all keys, all values, the queries' place, the keys' place)."""
        length = key.shape[1]
        keys, values = (gather(local.heads_first(x), (axis,), 2, scope) for x in (key, value))
        return keys, values, _at(positions, segments, lax.axis_index(axis) * length, length), (positions, segments)

    def forward(query, key, value, positions, segments):
        seen = view(key, value, positions, segments, "kv.forward")
        return kept(query, key, value, positions, segments, *local.forward(local.grouped(query, key.shape[2]), *seen, window, limit))

    def backward(residuals, cotangent):
        query, key, value, positions, segments, out, lse = residuals
        pull = Pull(query, key, out, cotangent)
        seen = view(key, value, positions, segments, "kv.backward")
        dq, dk, dv = local.backward(pull.query, *seen, lse, pull.cotangent, pull.delta, window, limit)
        return pull.back(dq, *(scatter(x, (axis,), 2, "kv.gradient") for x in (dk, dv)))

    return Kernel(forward, backward)
