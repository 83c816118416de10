"""The transformer put together: embedding, a scan over blocks, final norm, head and loss."""
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxpara.collectives import match
from jaxpara.model.attention import Attention
from jaxpara.model.embedding import Embedding, Head
from jaxpara.model.mlp import MLP
from jaxpara.model.moe import MoE
from jaxpara.model.norm import Norm
from jaxpara.model.rope import rope_table
from jaxpara.params import kinds, segments

EMBEDDING_SITE, ATTENTION_SITE, MLP_SITE = 0, 1, 2
"""Dropout sites: each folds its own number into the key."""


class Block(nnx.Module):
    """One layer, but for its feed-forward block, which is of one of two kinds."""

    def __init__(self, table, name, model):
        self.norm1, self.attention = Norm(table, f"{name}.norm1", model.norm_eps), Attention(table, f"{name}.attention", model)
        self.norm2 = Norm(table, f"{name}.norm2", model.norm_eps)

    def __call__(self, x, feed, layer, rope, ctx):
        """x: [b, s, H] at a border; feed: `MLP` or `MoE`; layer: int32 [], its number; rope: tables or None. Returns the same layout, and the
        `Load` of a MoE."""
        heads = checkpoint_name(ctx.exit(self.attention(ctx.enter(self.norm1(x), "attention"), rope, ctx), "attention"), "matmul")
        x += ctx.dropout(self.attention.bias(heads), ATTENTION_SITE, layer)
        if isinstance(feed, MoE):
            out, load = ctx.moe(feed, self.norm2(x), layer)
        else:
            out, load = feed.bias(ctx.exit(feed(ctx.enter(self.norm2(x), "mlp"), ctx), "mlp")), None
        return x + ctx.dropout(out, MLP_SITE, layer), load


def periods(leaf, first, repeats, each):
    """Rows of a stacked array from `first` on, as [repeats, each, ...], without `each` where it is 1."""
    rows = leaf[first:first + repeats * each]
    return rows if each == 1 else rows.reshape(repeats, each, *leaf.shape[1:])


def by_layer(found, layers):
    """The `Load`s of several runs of layers, [(numbers, Load of stacked rows)], as one with a row for every layer of the model; None for none."""
    total = None
    for numbers, load in found:
        if total is None:
            total = jax.tree.map(lambda rows: match(jnp.zeros((layers, *rows.shape[1:]), rows.dtype), rows), load)
        place = jnp.where(numbers >= 0, numbers, layers)
        total = jax.tree.map(lambda whole, rows: whole.at[place].add(rows, mode="drop"), total, load)
    return total


class GPT(nnx.Module):
    """Parameters are *stored* pieces until `ctx.full` makes them usable, one block at a time."""

    def __init__(self, table, model):
        self.embedding = Embedding(table, model)
        self.layers = Block(table, "layers", model)
        made = {"dense": lambda: MLP(table, "layers.mlp", model), "moe": lambda: MoE(table, "layers.moe", model)}
        self.feeds = nnx.Dict({kind: made[kind]() for kind in made if kind in kinds(model)})
        self.norm = Norm(table, "norm", model.norm_eps)
        self.model = model
        if not model.tied:
            self.head = Head(table)

    def embed(self, tokens, ctx):
        """int32 [b, s] -> [b, s, H] at a border."""
        return ctx.dropout(ctx.full(self.embedding)(tokens, ctx), EMBEDDING_SITE, 0)

    def blocks(self, x, numbers, ctx, padded=False):
        """x: [b, s, H] at a border, through the stacked layers at hand. numbers: int32, each layer's place in the model, for padding -1;
        padded: whether there is any. Returns x, and of a model with experts the `Load`s of all its layers, zeros for those that are not at hand."""
        model, rope = self.model, None
        if model.style == "llama":
            rope = rope_table(ctx.positions(), model.head_dim, model.rope_theta, jnp.promote_types(x.dtype, jnp.float32))
        parts = {"block": nnx.split(self.layers), **{kind: nnx.split(feed) for kind, feed in self.feeds.items()}}
        def one_layer(kind, x, stored, number, shared):
            rope, bound = shared[0], ctx.bind(shared[1])
            block, feed = (bound.full(nnx.merge(parts[part][0], stored[part])) for part in ("block", kind))
            return block(x, feed, number, rope, bound)

        def period(pattern, alone, x, layers):
            loads, shared = [], (rope, ctx.rows_alone() if alone else ctx.rows)
            for i, kind in enumerate(pattern):
                at = {"block": i, kind: pattern[:i].count(kind)}
                one = lambda part, row: layers[part] if len(pattern) == 1 or part != "block" and pattern.count(kind) == 1 else (
                    jax.tree.map(lambda leaf: leaf[row], layers[part]))
                stored, number = {part: one(part, row) for part, row in at.items()}, layers["number"] if len(pattern) == 1 else layers["number"][i]
                out, load = ctx.remat(partial(one_layer, kind), alone or len(pattern) > 1)(x, stored, number, shared)
                x = jnp.where(number >= 0, out, x) if padded else out
                loads += [(number, load)] * (load is not None)
            return x, loads

        found, taken = [], dict.fromkeys(parts, 0)
        for pattern, repeats in segments(model, numbers.shape[0]):
            count = {"block": len(pattern), **{kind: pattern.count(kind) for kind in set(pattern)}}
            stacks = {part: jax.tree.map(partial(periods, first=taken[part], repeats=repeats, each=each), parts[part][1])
                      for part, each in count.items()}
            stacks["number"] = periods(numbers, taken["block"], repeats, count["block"])
            x, loads = lax.scan(partial(period, pattern, repeats == 1), x, stacks)
            found += loads
            taken = {part: taken[part] + repeats * count.get(part, 0) for part in parts}
        return x, by_layer(found, model.layers)

    def hidden(self, tokens, ctx):
        """int32 [b, s] -> [b, s, H] at a border, before the final norm, and the layers' `Load`s."""
        return self.blocks(self.embed(tokens, ctx), jnp.arange(self.model.layers), ctx)

    def output(self, x, ctx):
        """[b, s, H] at a border, after the layers -> (normed [b, s, H] inside a block, head weight [V, H] usable on this device)."""
        x = ctx.enter(ctx.full(self.norm)(x), "head")
        table = ctx.full(self.embedding).tokens if self.model.tied else ctx.full(self.head).weight
        return x, table[...]

    def loss(self, tokens, targets, ctx):
        """Summed next-token loss of this device's counted targets (-1: not counted), and the layers' `Load`s. tokens, targets: int32 [b, s]."""
        x, loads = self.hidden(tokens, ctx)
        return self.end(x, targets, ctx), loads

    def end(self, x, targets, ctx):
        """Final norm, head and summed loss. x: [b, s, H] at a border; targets: int32 [b, s] of the tokens inside a block."""
        return ctx.cross_entropy(*self.output(x, ctx), targets)

    def logits(self, tokens, ctx):
        """int32 [b, s] -> [b, s, V_padded], split over tp by the rules."""
        return self.predict(self.hidden(tokens, ctx)[0], ctx)

    def predict(self, x, ctx):
        """[b, s, H] at a border, after the layers -> logits [b, s, V_padded]."""
        return jnp.einsum("bsh,vh->bsv", *self.output(x, ctx))
