"""The mixture-of-experts block: router, routed experts, shared experts."""
import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxpara.kernels.grouped import grouped
from jaxpara.model.declare import declare
from jaxpara.model.mlp import MLP, gelu, swiglu
from jaxpara.model.router import Router

MOE_SITE = 5


class Experts(nnx.Module):
    """The experts of one device. Weights: [E here, H, F/N_tp] and [E here, F/N_tp, H]."""

    def __init__(self, table, name, model):
        self.gated = model.style == "llama"
        self.up, self.down = declare(table, f"{name}.up"), declare(table, f"{name}.down")
        if self.gated:
            self.gate = declare(table, f"{name}.gate")

    def __call__(self, rows, groups):
        """Rows of tokens through their experts (`jaxpara.transport` says how they lie): [..., H] -> [..., H], partial sums over tp."""
        project = lambda weight: checkpoint_name(each_expert(rows, weight[...], groups), "matmul")
        inner = swiglu(project(self.gate), project(self.up)) if self.gated else gelu(project(self.up))
        return each_expert(inner, self.down[...], groups)


def each_expert(rows, weight, groups):
    """rows [E, r, A], or [r, A] sorted by expert, times weight [E, A, B]."""
    if rows.ndim == 3:
        return jnp.einsum("era,eab->erb", rows, weight)
    return rows @ weight[0] if groups is None else grouped(rows, weight, groups)


class MoE(nnx.Module):
    def __init__(self, table, name, model):
        self.router, self.experts, self.model = Router(table, name, model), Experts(table, name, model), model
        if model.moe.shared:
            self.shared = MLP(table, f"{name}.shared", model)

    def __call__(self, x, layer, ctx):
        """x: [b, s, H], the tokens that this device routes; layer: int32 []. Returns ([b, s, H], partial sums over tp where it splits widths, and
        the layer's `Load`)."""
        routed, load = self.router(x, layer, ctx)
        load = load._replace(routed=(routed.chosen, routed.expert)) if ctx.watching else load
        out = ctx.through_experts(x, routed, self.experts)
        if self.model.moe.shared:
            out += self.shared(x, ctx)
        return self.dropout(out, layer, ctx), load

    def dropout(self, out, layer, ctx):
        """In training a part of the tokens passes by, so that later layers have met what a dropped token is."""
        rate = self.model.moe.dropout
        if not rate or not ctx.training:
            return out
        stays = ctx.draw(MOE_SITE, layer, lambda key: jax.random.bernoulli(key, 1 - rate, (1,)))
        return jnp.where(stays, out / (1 - rate), 0).astype(out.dtype)
