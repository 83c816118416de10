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


def whole(window=None, limit=local.BLOCK):
    """Kernel for a device that holds whole sequences."""
    def forward(query, key, value, positions, segments):
        at, q = (positions, segments), local.grouped(query, key)
        out, lse = local.forward(q, key, value, at, at, window, limit)
        return kept(query, key, value, positions, segments, out, lse)

    def backward(residuals, cotangent):
        query, key, value, positions, segments, out, lse = residuals
        at, split = (positions, segments), lambda x: local.grouped(x, key)
        dq, dk, dv = local.backward(split(query), key, value, at, at, lse, split(cotangent), split_sum(out, cotangent, key), window, limit)
        return dq.reshape(query.shape).astype(query.dtype), dk.astype(key.dtype), dv.astype(value.dtype)

    return Kernel(forward, backward)


def kept(query, key, value, positions, segments, out, lse):
    """(out, residuals) of a forward pass; out and lse are named for the recompute policy that keeps attention."""
    out = checkpoint_name(out.astype(query.dtype).reshape(query.shape), "attention")
    return out, (query, key, value, positions, segments, out, checkpoint_name(lse, "attention"))


def split_sum(out, cotangent, key):
    """`local.row_sum` on grouped heads."""
    return local.row_sum(local.grouped(out, key), local.grouped(cotangent, key))


def ring(axis, n, inner=1, window=None, limit=local.BLOCK):
    """Kernel for a ring of `n` devices on mesh axis `axis`; with `inner` > 1, of every inner-th device (hybrid)."""
    pairs = [(g * inner + j, (g + 1) % n * inner + j) for g in range(n) for j in range(inner)]
    place = lambda: lax.axis_index(axis) // inner

    def forward(query, key, value, positions, segments):
        length, rank, q = query.shape[1], place(), local.grouped(query, key)
        half = min(limit, max(length // 2, 1))     # two blocks at least: under the zigzag order one of them is skipped
        query_at = _at(positions, segments, rank * length, length)

        def see(state, key, value, hop):
            key_at = _at(positions, segments, (rank - hop) % n * length, length)
            return local.merge(state, local.forward(q, key, value, query_at, key_at, window, half))

        def one_hop(carry, hop):
            state, key, value = carry
            following = shift((key, value), axis, pairs, "ring.forward")
            return (see(state, key, value, hop), *following), None

        acc = local.wide(query.dtype)
        empty = (jnp.zeros(q.shape, acc), jnp.full(q.shape[:-1], -jnp.inf, acc))
        carry = (match(empty, query, key, value, *query_at), match(key, rank), match(value, rank))
        (state, last_key, last_value), _ = lax.scan(one_hop, carry, jnp.arange(n - 1))
        out, lse = see(state, last_key, last_value, n - 1)
        return kept(query, key, value, positions, segments, out, lse)

    def backward(residuals, cotangent):
        query, key, value, positions, segments, out, lse = residuals
        length, rank, split = query.shape[1], place(), lambda x: local.grouped(x, key)
        half = min(limit, max(length // 2, 1))
        query_at = _at(positions, segments, rank * length, length)
        delta = split_sum(out, cotangent, key)

        def see(grads, key, value, hop):
            key_at = _at(positions, segments, (rank - hop) % n * length, length)
            parts = local.backward(split(query), key, value, query_at, key_at, lse, split(cotangent), delta, window, half)
            return tuple(total + part for total, part in zip(grads, parts))

        def one_hop(carry, hop):
            grads, key, value = carry
            following = shift((key, value), axis, pairs, "ring.backward")
            dq, dk, dv = see(grads, key, value, hop)
            return ((dq, *shift((dk, dv), axis, pairs, "ring.gradient")), *following), None

        acc = local.wide(query.dtype)
        zeros = (jnp.zeros(split(query).shape, acc), jnp.zeros(key.shape, acc), jnp.zeros(value.shape, acc))
        carry = (match(zeros, query, key, value, cotangent, *query_at), match(key, rank), match(value, rank))
        (grads, last_key, last_value), _ = lax.scan(one_hop, carry, jnp.arange(n - 1))
        dq, dk, dv = see(grads, last_key, last_value, n - 1)
        dk, dv = shift((dk, dv), axis, pairs, "ring.gradient")
        return dq.reshape(query.shape).astype(query.dtype), dk.astype(key.dtype), dv.astype(value.dtype)

    return Kernel(forward, backward)


def allgather(axis, window=None, limit=local.BLOCK):
    """Kernel that gathers all keys and values over `axis`; dK, dV come back through a reduce-scatter in float32.

    Sends per device 2·(n-1)/n·b·S·N_kv·d elements forward, as much again in backward, and dK, dV. Nothing gathered is kept.
    """
    def forward(query, key, value, positions, segments):
        length, rank = query.shape[1], lax.axis_index(axis)
        query_at, key_at = _at(positions, segments, rank * length, length), (positions, segments)
        keys, values = (gather(x, (axis,), 1, "kv.forward") for x in (key, value))
        out, lse = local.forward(local.grouped(query, key), keys, values, query_at, key_at, window, limit)
        return kept(query, key, value, positions, segments, out, lse)

    def backward(residuals, cotangent):
        query, key, value, positions, segments, out, lse = residuals
        length, rank, split = query.shape[1], lax.axis_index(axis), lambda x: local.grouped(x, key)
        query_at, key_at = _at(positions, segments, rank * length, length), (positions, segments)
        keys, values = (gather(x, (axis,), 1, "kv.backward") for x in (key, value))
        dq, dk, dv = local.backward(split(query), keys, values, query_at, key_at, lse, split(cotangent),
                                    split_sum(out, cotangent, key), window, limit)
        dk, dv = (scatter(x, (axis,), 1, "kv.gradient") for x in (dk, dv))
        return dq.reshape(query.shape).astype(query.dtype), dk.astype(key.dtype), dv.astype(value.dtype)

    return Kernel(forward, backward)
