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

    def embed(self, tokens, ctx):
        """int32 [b, s] -> [b, s, H] at a border."""
        return ctx.dropout(ctx.full(self.embedding)(tokens, ctx), EMBEDDING_SITE, 0)

    def blocks(self, x, numbers, ctx, padded=False):
        """x: [b, s, H] at a border, through the stacked layers at hand. numbers: int32, each layer's place in the model, for padding -1;
        padded: whether there is any."""
        model, rope = self.model, None
        if model.style == "llama":
            rope = rope_table(ctx.positions(), model.head_dim, model.rope_theta, jnp.promote_types(x.dtype, jnp.float32))
        structure, stacked = nnx.split(self.layers)

        def one_layer(x, stored, number, shared):
            rope, rows = shared
            return ctx.full(nnx.merge(structure, stored))(x, number, rope, ctx.bind(rows))

        one_layer, shared = ctx.remat(one_layer), (rope, ctx.rows)

        def step(x, layer):
            stored, number = layer
            out = one_layer(x, stored, number, shared)
            return jnp.where(number >= 0, out, x) if padded else out, None

        return lax.scan(step, x, (stacked, numbers))[0]

    def hidden(self, tokens, ctx):
        """int32 [b, s] -> [b, s, H] at a border, before the final norm."""
        return self.blocks(self.embed(tokens, ctx), jnp.arange(self.model.layers), ctx)

    def output(self, x, ctx):
        """[b, s, H] at a border, after the layers -> (normed [b, s, H] inside a block, head weight [V, H] usable on this device)."""
        x = ctx.enter(ctx.full(self.norm)(x), "head")
        table = ctx.full(self.embedding).tokens if self.model.tied else ctx.full(self.head).weight
        return x, table[...]

    def loss(self, tokens, targets, ctx):
        """Summed next-token loss of this device's counted targets (-1: not counted). tokens, targets: int32 [b, s]."""
        return self.end(self.hidden(tokens, ctx), targets, ctx)

    def end(self, x, targets, ctx):
        """Final norm, head and summed loss. x: [b, s, H] at a border; targets: int32 [b, s] of the tokens inside a block."""
        return ctx.cross_entropy(*self.output(x, ctx), targets)

    def logits(self, tokens, ctx):
        """int32 [b, s] -> [b, s, V_padded], split over tp by the rules."""
        return self.predict(self.hidden(tokens, ctx), ctx)

    def predict(self, x, ctx):
        """[b, s, H] at a border, after the layers -> logits [b, s, V_padded]."""
        return jnp.einsum("bsh,vh->bsv", *self.output(x, ctx))
