"""Next-token loss over a vocabulary split over tp, a chunk of tokens at a time, gradients in the same pass.

The loss is linear in its own cotangent, so each chunk's logits can be turned into gradients while they exist: nothing of
size tokens × V is ever kept and no logits are computed twice. Padded columns are masked; targets below 0 are not counted.
"""
import jax.numpy as jnp
from jax import lax

from jaxpara.collectives import match, max_over, sum_over
from jaxpara.kernels.local import wide


def cross_entropy_reference(x, weight, targets, vocab):
    """Summed loss the obvious way, all logits at once. x: [b, s, H], weight: [V, H], targets: int32 [b, s]."""
    logits = jnp.einsum("bsh,vh->bsv", x, weight).astype(wide(x.dtype))[..., :vocab]
    top = logits.max(-1, keepdims=True)
    log_normaliser = jnp.log(jnp.exp(logits - top).sum(-1)) + top[..., 0]
    gold = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    return jnp.where(targets >= 0, log_normaliser - gold, 0).sum()


def loss_and_gradients(x, weight, targets, *, vocab, axes, limit, gradients):
    """Summed loss of this device's tokens, and its gradients on request.

    x: [b, s, H]; weight: [V_padded/tp, H], this device's rows; targets: int32 [b, s]; vocab: V; axes: ("tp",) or (); limit:
    tokens per chunk. Returns (loss [], dx [b, s, H] of this vocabulary shard only, dweight [V_padded/tp, H] wide), or
    (loss, None, None). Sends, per chunk, a maximum and a sum of 1 and 2 wide numbers per token over `axes`.
    """
    acc, tokens, (rows, width) = wide(x.dtype), targets.size, weight.shape
    first = lax.axis_index(axes[0]) * rows if axes else 0
    known = first + jnp.arange(rows) < vocab
    n_chunks = -(-tokens // limit)
    chunk = -(-tokens // n_chunks)
    fill = n_chunks * chunk - tokens
    flat_x = jnp.pad(x.reshape(tokens, width), ((0, fill), (0, 0))).reshape(n_chunks, chunk, width)
    flat_targets = jnp.pad(targets.reshape(tokens), (0, fill), constant_values=-1).reshape(n_chunks, chunk)

    def one_chunk(carry, piece):
        loss, dweight = carry
        x, targets = piece
        logits = jnp.where(known, jnp.einsum("th,vh->tv", x, weight, preferred_element_type=acc), -jnp.inf)
        top = max_over(logits.max(-1), axes, "loss.max")
        exponentials = jnp.exp(logits - top[:, None])
        is_target = (targets - first)[:, None] == jnp.arange(rows)
        sums = jnp.stack([exponentials.sum(-1), jnp.where(is_target, logits, 0).sum(-1)])
        total, gold = sum_over(sums, axes, "loss.sum")
        counted = targets >= 0
        loss += jnp.where(counted, jnp.log(total) + top - gold, 0).sum()
        if not gradients:
            return (loss, dweight), None
        dlogits = jnp.where(counted[:, None], exponentials / total[:, None] - is_target, 0).astype(x.dtype)
        dweight += jnp.einsum("tv,th->vh", dlogits, x, preferred_element_type=acc)
        return (loss, dweight), jnp.einsum("tv,vh->th", dlogits, weight).astype(x.dtype)

    loss = match(jnp.zeros((), acc), targets)
    dweight = match(jnp.zeros(weight.shape, acc), x, weight) if gradients else None
    (loss, dweight), dx = lax.scan(one_chunk, (loss, dweight), (flat_x, flat_targets))
    return loss, dx.reshape(-1, width)[:tokens].reshape(x.shape) if gradients else None, dweight
