"""Feed-forward: GELU with biases (GPT-2) or SwiGLU (Llama). Column-parallel, then row-parallel."""
import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxpara.collectives import recomputed
from jaxpara.model.declare import declare
from jaxpara.taps import matmul


@recomputed
def swiglu(gate, up):
    return jax.nn.silu(gate) * up


@recomputed
def gelu(up):
    return jax.nn.gelu(up, approximate=True)


class MLP(nnx.Module):
    def __init__(self, table, name, model):
        self.up, self.down = declare(table, f"{name}.up"), declare(table, f"{name}.down")
        self.gated = model.style == "llama"
        if self.gated:
            self.gate = declare(table, f"{name}.gate")
        self.biased = f"{name}.up_bias" in table
        if self.biased:
            self.up_bias, self.down_bias = declare(table, f"{name}.up_bias"), declare(table, f"{name}.down_bias")

    def __call__(self, x, ctx):
        """x: [b, s, H], inside a block. Returns [b, s, H], summed over the inner width by `Ctx.exit`; without the down bias."""
        project = lambda weight: checkpoint_name(matmul("bsh,hf->bsf", x, weight), "matmul")
        inner = project(self.up)
        if self.gated:
            inner = swiglu(project(self.gate), inner)
        else:
            inner = gelu(inner + self.up_bias[...] if self.biased else inner)
        return matmul("bsf,fh->bsh", inner, self.down)

    def bias(self, x):
        """Add the down bias: once, after the inner width is summed."""
        return x + self.down_bias[...] if self.biased else x
