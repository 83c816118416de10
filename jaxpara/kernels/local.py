"""Attention of one device's queries to one device's keys, blockwise, with its own backward pass; and a slow reference.

FlashAttention in plain JAX (Dao 2023, arXiv 2307.08691): no S × S tensor is kept; forward keeps the log of each row's
normaliser (lse), backward recomputes the probabilities from it block by block. Pairs of blocks that cannot see each other
are skipped, which halves causal attention and is what balances the zigzag order. Sums are in float32, or float64 when the
inputs are.
"""
import jax
import jax.numpy as jnp
from jax import lax

from jaxpara.collectives import match

BLOCK, SMALLEST = 512, 64
"""Longest block of queries or keys, and the shortest that is worth a loop."""

NO_QUERY, NO_KEY = -1, 2 ** 31 - 1
"""Positions of the slots that fill up a last block: a query before every key, a key after every query."""


def wide(dtype):
    """Accumulator dtype: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def visible(query_at, key_at, window):
    """Who sees whom: same document, not later, and within the window. query_at, key_at: (positions, segments), each int32 [b, s].

    Returns bool [b, s, t]. Positions are compared, never slots, so any order of the sequence is right.
    """
    (query_position, query_segment), (key_position, key_segment) = query_at, key_at
    behind = query_position[:, :, None] - key_position[:, None, :]
    seen = (query_segment[:, :, None] == key_segment[:, None, :]) & (behind >= 0)
    return seen if window is None else seen & (behind < window)


def may_see(query_at, key_at, window):
    """Whether any query of a block may see any key of another, judged from the blocks' extremes (never wrongly no). bool []."""
    (query_position, query_segment), (key_position, key_segment) = query_at, key_at
    seen = ((query_position.max(1) >= key_position.min(1)) & (query_segment.max(1) >= key_segment.min(1))
            & (query_segment.min(1) <= key_segment.max(1)))
    if window is not None:
        seen &= query_position.min(1) - key_position.max(1) < window
    return seen.any()


def attention_reference(query, key, value, query_at, key_at, window=None):
    """The same result the obvious way, whole S × S scores at once: what the blockwise kernels are tested against."""
    groups = query.shape[2] // key.shape[2]
    key, value = jnp.repeat(key, groups, axis=2), jnp.repeat(value, groups, axis=2)
    scores = jnp.einsum("bsnd,btnd->bnst", query, key) / query.shape[-1] ** 0.5
    seen = visible(query_at, key_at, window)[:, None]
    weights = jnp.where(seen, jnp.exp(scores - jnp.where(seen, scores, -jnp.inf).max(-1, keepdims=True, initial=-1e30)), 0)
    weights /= jnp.maximum(weights.sum(-1, keepdims=True), 1e-300 if scores.dtype == jnp.float64 else 1e-30)
    return jnp.einsum("bnst,btnd->bsnd", weights, value)


def blocks(length, limit):
    """(number of blocks, their length) for `length` slots in blocks of about equal length, at most `limit` or SMALLEST; the last may need filling."""
    n = -(-length // max(limit, SMALLEST))
    return n, -(-length // n)


def _pair_forward(query, key, value, seen):
    """One block pair. query [b,M,s,G,d], key, value [b,M,t,d]; returns (out [b,M,s,G,d] normalised, lse [b,M,s,G]), both wide."""
    acc = wide(query.dtype)
    scores = jnp.einsum("bmsgd,bmtd->bmsgt", query, key, preferred_element_type=acc) * query.shape[-1] ** -0.5
    scores = jnp.where(seen[:, None, :, None, :], scores, -jnp.inf)
    top = scores.max(-1)
    top = jnp.where(jnp.isfinite(top), top, 0)      # a row that sees nothing: exp(-inf - 0) = 0, not exp(-inf + inf) = NaN
    weights = jnp.exp(scores - top[..., None])
    total = weights.sum(-1)
    out = jnp.einsum("bmsgt,bmtd->bmsgd", weights.astype(value.dtype), value, preferred_element_type=acc)
    return out / jnp.where(total > 0, total, 1)[..., None], jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1)), -jnp.inf)


def _pair_backward(query, key, value, seen, lse, out_cotangent, delta):
    """One block pair's (dq, dk, dv), wide. lse, delta: [b,M,s,G]; delta is the row sum of out · its cotangent."""
    acc, scale = wide(query.dtype), query.shape[-1] ** -0.5
    scores = jnp.einsum("bmsgd,bmtd->bmsgt", query, key, preferred_element_type=acc) * scale
    lse = jnp.where(jnp.isfinite(lse), lse, 0)[..., None]
    weights = jnp.exp(jnp.where(seen[:, None, :, None, :], scores - lse, -jnp.inf))
    dv = jnp.einsum("bmsgt,bmsgd->bmtd", weights.astype(value.dtype), out_cotangent, preferred_element_type=acc)
    dweights = jnp.einsum("bmsgd,bmtd->bmsgt", out_cotangent, value, preferred_element_type=acc)
    dscores = (weights * (dweights - delta[..., None]) * scale).astype(query.dtype)
    dq = jnp.einsum("bmsgt,bmtd->bmsgd", dscores, key, preferred_element_type=acc)
    dk = jnp.einsum("bmsgt,bmsgd->bmtd", dscores, query, preferred_element_type=acc)
    return dq, dk, dv


def merge(first, second):
    """Join two (out, lse) over disjoint sets of keys. A side that saw nothing has lse = -inf and counts for nothing."""
    (out_a, lse_a), (out_b, lse_b) = first, second
    top = jnp.maximum(lse_a, lse_b)
    top = jnp.where(jnp.isfinite(top), top, 0)
    weight_a, weight_b = jnp.exp(lse_a - top), jnp.exp(lse_b - top)
    total = weight_a + weight_b
    safe = jnp.where(total > 0, total, 1)
    out = (out_a * weight_a[..., None] + out_b * weight_b[..., None]) / safe[..., None]
    return out, jnp.where(total > 0, top + jnp.log(safe), -jnp.inf)


def grouped(query, kv_heads):
    """[b, s, N_q, d] -> [b, N_kv, s, N_q/N_kv, d]: the query heads beside the KV head they share, matmul dims innermost."""
    return jnp.moveaxis(query.reshape(*query.shape[:2], kv_heads, -1, query.shape[-1]), 2, 1)


def ungrouped(query):
    """The inverse of `grouped`."""
    moved = jnp.moveaxis(query, 1, 2)
    return moved.reshape(*moved.shape[:2], -1, moved.shape[-1])


def heads_first(key):
    """[b, t, N_kv, d] <-> [b, N_kv, t, d] (its own inverse)."""
    return jnp.swapaxes(key, 1, 2)


def _cut(tree, count, filler=0):
    """Arrays with the sequence in dim 2 (positions, segments: dim 1) -> [n, ...] of equal pieces, for a scan over blocks.

    count: (n, length) of `blocks`. Slots that fill up the last block hold 0, or `filler` in 2-dim arrays.
    """
    n, length = count

    def cut(x):
        dim = min(x.ndim - 1, 2)
        fill = [(0, n * length - x.shape[dim] if i == dim else 0) for i in range(x.ndim)]
        x = jnp.pad(x, fill, constant_values=filler if x.ndim == 2 else 0)
        return jnp.moveaxis(x.reshape(*x.shape[:dim], n, length, *x.shape[dim + 1:]), dim, 0)

    return jax.tree.map(cut, tree)


def _join(tree, length):
    """The inverse of `_cut` for arrays with the sequence in dim 2, cut back to `length`."""
    whole = lambda x: jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], x.shape[0] * x.shape[3], *x.shape[4:])
    return jax.tree.map(lambda x: whole(x)[:, :, :length], tree)


def forward(query, key, value, query_at, key_at, window=None, limit=BLOCK):
    """Attention of grouped queries [b,M,s,G,d] to keys, values [b,M,t,d].

    query_at, key_at: (positions, segments) int32 [b, s] and [b, t]. Returns (out [b,M,s,G,d], lse [b,M,s,G]), both wide;
    rows that see no key have out 0 and lse -inf.
    """
    # else autodiff of a scan over layers finds that masks depend on positions alone, and keeps those of all block pairs at once
    query, query_at, key_at = lax.optimization_barrier((query, query_at, key_at))
    n_query, n_key = blocks(query.shape[2], limit), blocks(key.shape[2], limit)
    if n_query[0] == n_key[0] == 1:
        return _pair_forward(query, key, value, visible(query_at, key_at, window))
    keys, acc = (*_cut((key, value), n_key), _cut(key_at, n_key, NO_KEY)), wide(query.dtype)

    def one_query(_, query_block):
        query, query_at = query_block

        def one_key(carry, key_block):
            key, value, key_at = key_block
            see = lambda: merge(carry, _pair_forward(query, key, value, visible(query_at, key_at, window)))
            return lax.cond(may_see(query_at, key_at, window), see, lambda: carry), None

        empty = (jnp.zeros(query.shape, acc), jnp.full(query.shape[:-1], -jnp.inf, acc))
        return None, lax.scan(one_key, match(empty, query, key, value, *query_at, *key_at), keys)[0]

    queries = (_cut(query, n_query), _cut(query_at, n_query, NO_QUERY))
    return _join(lax.scan(one_query, None, queries)[1], query.shape[2])


def backward(query, key, value, query_at, key_at, lse, out_cotangent, delta, window=None, limit=BLOCK):
    """(dq [b,M,s,G,d], dk, dv [b,M,t,d]), wide, from the lse of *all* keys a query saw and delta = row sum of out · cotangent."""
    n_query, n_key = blocks(query.shape[2], limit), blocks(key.shape[2], limit)
    if n_query[0] == n_key[0] == 1:
        return _pair_backward(query, key, value, visible(query_at, key_at, window), lse, out_cotangent, delta)
    acc, types = wide(query.dtype), (query, key, value, out_cotangent, *query_at, *key_at)
    queries = (*_cut((query, lse, out_cotangent, delta), n_query), _cut(query_at, n_query, NO_QUERY))

    def one_key(dq, key_block):
        key, value, key_at = key_block

        def one_query(carry, query_block):
            query, lse, out_cotangent, delta, query_at, dq = query_block

            def see():
                dq_part, dk_part, dv_part = _pair_backward(query, key, value, visible(query_at, key_at, window), lse, out_cotangent, delta)
                return (carry[0] + dk_part, carry[1] + dv_part), dq + dq_part

            return lax.cond(may_see(query_at, key_at, window), see, lambda: (carry, dq))

        empty = match((jnp.zeros(key.shape, acc), jnp.zeros(value.shape, acc)), *types)
        (dk, dv), dq = lax.scan(one_query, empty, (*queries, dq))
        return dq, (dk, dv)

    dq = match(_cut(jnp.zeros(query.shape, acc), n_query), *types)
    dq, keys = lax.scan(one_key, dq, (*_cut((key, value), n_key), _cut(key_at, n_key, NO_KEY)))
    return _join(dq, query.shape[2]), *_join(keys, key.shape[2])


def row_sum(out, out_cotangent):
    """delta of the backward pass, of grouped heads: [b,M,s,G]."""
    return (out.astype(wide(out.dtype)) * out_cotangent.astype(wide(out.dtype))).sum(-1)
