"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), halves rotated against each other as in Llama."""
import jax.numpy as jnp


def rope_table(positions, head_dim, theta, dtype):
    """cos and sin, each [b, s, 1, d/2], of int32 positions [b, s]; positions are data, so any order of the sequence is right."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=dtype) / head_dim)
    angles = positions.astype(dtype)[..., None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x, table):
    """x: [b, s, heads, d], rotated by its positions; computed in the table's dtype, returned in x's."""
    cos, sin = table
    first, second = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
