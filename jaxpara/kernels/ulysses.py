"""Ulysses: heads are dealt out, the sequence is collected, attention runs on whole sequences, and back.

Jacobs et al. 2023 (arXiv 2309.14509). With fewer KV heads than devices each is copied until there are enough, and its
gradients are summed over the copies. The kernel inside sees longer sequences and fewer heads: a whole-sequence kernel
(pure Ulysses) or a ring over the remaining degree (hybrid).

Sends per device and direction (n-1)/n of its own q, k, v and out: 4(N_kv/N_q + 1)·δ·b·S·N_q·d/(N_sp·N_tp) in all.
"""
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxpara.collectives import exchange
from jaxpara.kernels import Kernel, local


def ulysses(axis, n, degree, kv_heads, inside):
    """Kernel for `degree` neighbours among the `n` devices of mesh axis `axis`; kv_heads: KV heads of this device, copied if fewer
    than `degree`; `inside`: the `Kernel` for what the neighbours collect."""
    groups = None if degree == n else [list(range(first, first + degree)) for first in range(0, n, degree)]
    copies = max(degree // kv_heads, 1)

    def to_heads(x):
        return exchange(x, axis, 2, 1, "ulysses.in", groups)

    def to_sequence(x):
        return exchange(x, axis, 1, 2, "ulysses.out", groups)

    def sum_copies(x):
        if copies == 1:
            return x
        parts = x.astype(local.wide(x.dtype)).reshape(*x.shape[:2], kv_heads, copies, x.shape[-1])
        return parts.sum(3).astype(x.dtype)

    def forward(query, key, value, positions, segments):
        key, value = (jnp.repeat(x, copies, axis=2) if copies > 1 else x for x in (key, value))
        out, residuals = inside.forward(to_heads(query), to_heads(key), to_heads(value), positions, segments)
        return checkpoint_name(to_sequence(out), "attention"), residuals

    def backward(residuals, cotangent):
        dq, dk, dv = inside.backward(residuals, to_heads(cotangent))
        return to_sequence(dq), sum_copies(to_sequence(dk)), sum_copies(to_sequence(dv))

    return Kernel(forward, backward)
