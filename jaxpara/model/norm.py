"""LayerNorm and RMSNorm, in float32 or wider."""
import jax.numpy as jnp
from flax import nnx
from jax import lax

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
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if not hasattr(self, "bias"):
            return (rms(wide, self.eps) * self.scale[...]).astype(x.dtype)
        wide -= wide.mean(-1, keepdims=True)
        return (rms(wide, self.eps) * self.scale[...] + self.bias[...]).astype(x.dtype)


def rms(x, eps):
    """x divided by the root of its mean square over the last dim."""
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + eps)
