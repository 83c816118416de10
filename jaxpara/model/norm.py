"""LayerNorm and RMSNorm: statistics in float32 or wider, scaled in the compute dtype (so that no wider copy of a gathered scale is kept)."""
from functools import partial

import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpara.collectives import recomputed
from jaxpara.model.declare import declare


class Norm(nnx.Module):
    """Over the last dim. RMSNorm when the table has no bias for it, LayerNorm when it has."""

    def __init__(self, table, name, eps):
        self.scale = declare(table, f"{name}.scale")
        if f"{name}.bias" in table:
            self.bias = declare(table, f"{name}.bias")
        self.eps = eps

    def __call__(self, x):
        """x: [..., H]; returns the same shape and dtype."""
        normed = recomputed(partial(scaled, centred=hasattr(self, "bias"), eps=self.eps))(x, self.scale[...])
        return normed + self.bias[...] if hasattr(self, "bias") else normed


def scaled(x, scale, centred, eps):
    """x normed over the last dim, its mean taken off first if `centred`, times `scale`."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if centred:
        wide -= wide.mean(-1, keepdims=True)
    return rms(wide, eps).astype(x.dtype) * scale


def rms(x, eps):
    """x divided by the root of its mean square over the last dim."""
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + eps)
