"""Multi-head attention with grouped KV heads. Every device sees whole heads; how many is the parameters' business."""
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxpara.model.declare import declare
from jaxpara.model.norm import rms
from jaxpara.model.rope import rotate
from jaxpara.taps import matmul


class Attention(nnx.Module):
    def __init__(self, table, name, model):
        self.query, self.key, self.value, self.output = (
            declare(table, f"{name}.{part}") for part in ("query", "key", "value", "output"))
        self.biased = model.style == "gpt2"
        self.normed = model.qk_norm
        self.eps = model.norm_eps
        if self.biased:
            self.query_bias, self.key_bias, self.value_bias, self.output_bias = (
                declare(table, f"{name}.{part}_bias") for part in ("query", "key", "value", "output"))
        if self.normed:
            self.query_scale, self.key_scale = (declare(table, f"{name}.{part}_scale") for part in ("query", "key"))

    def __call__(self, x, rope, ctx):
        """x: [b, s, H], inside a block (see `Ctx.enter`). Returns [b, s, H], summed over heads by `Ctx.exit`; without the output bias."""
        project = lambda weight: checkpoint_name(matmul("bsh,hnd->bsnd", x, weight), "matmul")
        query, key, value = project(self.query), project(self.key), project(self.value)
        if self.biased:
            query, key, value = query + self.query_bias[...], key + self.key_bias[...], value + self.value_bias[...]
        if self.normed:
            query, key = self.norm_heads(query, self.query_scale), self.norm_heads(key, self.key_scale)
        if rope is not None:
            query, key = rotate(query, rope), rotate(key, rope)
        heads = ctx.attention(query, key, value)
        return matmul("bsnd,ndh->bsh", heads, self.output)

    def norm_heads(self, heads, scale):
        wide = heads.astype(jnp.promote_types(heads.dtype, jnp.float32))
        return rms(wide, self.eps).astype(heads.dtype) * scale[...]

    def bias(self, x):
        """Add the output bias: once, after the heads are summed."""
        return x + self.output_bias[...] if self.biased else x
