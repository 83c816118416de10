"""The transformer put together: embedding, a scan over blocks, final norm, head and loss."""
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxpara.model.attention import Attention
from jaxpara.model.embedding import Embedding, Head
from jaxpara.model.mlp import MLP
from jaxpara.model.norm import Norm
from jaxpara.model.rope import rope_table

EMBEDDING_SITE, ATTENTION_SITE, MLP_SITE = 0, 1, 2
"""Dropout sites: each folds its own number into the key."""


class Block(nnx.Module):
    def __init__(self, table, name, model):
        self.norm1, self.attention = Norm(table, f"{name}.norm1", model.norm_eps), Attention(table, f"{name}.attention", model)
        self.norm2, self.mlp = Norm(table, f"{name}.norm2", model.norm_eps), MLP(table, f"{name}.mlp", model)

    def __call__(self, x, layer, rope, ctx):
        """x: [b, s, H] at a border; layer: int32 [], its number; rope: tables or None. Returns the same layout."""
        heads = checkpoint_name(ctx.exit(self.attention(ctx.enter(self.norm1(x), "attention"), rope, ctx), "attention"), "matmul")
        x += ctx.dropout(self.attention.bias(heads), ATTENTION_SITE, layer)
        inner = ctx.exit(self.mlp(ctx.enter(self.norm2(x), "mlp"), ctx), "mlp")
        return x + ctx.dropout(self.mlp.bias(inner), MLP_SITE, layer)


class GPT(nnx.Module):
    """Parameters are *stored* pieces until `ctx.full` makes them usable, one block at a time."""

    def __init__(self, table, model):
        self.embedding = Embedding(table, model)
        self.layers = Block(table, "layers", model)
        self.norm = Norm(table, "norm", model.norm_eps)
        self.model = model
        if not model.tied:
            self.head = Head(table)

    def hidden(self, tokens, ctx):
        """int32 [b, s] -> [b, s, H] at a border, before the final norm."""
        model = self.model
        x = ctx.dropout(ctx.full(self.embedding)(tokens, ctx), EMBEDDING_SITE, 0)
        rope = None
        if model.style == "llama":
            rope = rope_table(ctx.positions(), model.head_dim, model.rope_theta, jnp.promote_types(x.dtype, jnp.float32))
        structure, stacked = nnx.split(self.layers)

        def one_layer(x, stored, number, shared):
            rope, rows = shared
            return ctx.full(nnx.merge(structure, stored))(x, number, rope, ctx.bind(rows))

        one_layer, shared = ctx.remat(one_layer), (rope, ctx.rows)
        return lax.scan(lambda x, layer: (one_layer(x, *layer, shared), None), x, (stacked, jnp.arange(model.layers)))[0]

    def output(self, tokens, ctx):
        """int32 [b, s] -> (normed [b, s, H] inside a block, head weight [V, H] usable on this device)."""
        x = ctx.enter(ctx.full(self.norm)(self.hidden(tokens, ctx)), "head")
        table = ctx.full(self.embedding).tokens if self.model.tied else ctx.full(self.head).weight
        return x, table[...]

    def loss(self, tokens, targets, ctx):
        """Summed next-token loss of this device's counted targets (-1: not counted). tokens, targets: int32 [b, s]."""
        x, weight = self.output(tokens, ctx)
        return ctx.cross_entropy(x, weight, targets)

    def logits(self, tokens, ctx):
        """int32 [b, s] -> [b, s, V_padded], split over tp by the rules."""
        x, weight = self.output(tokens, ctx)
        return jnp.einsum("bsh,vh->bsv", x, weight)
