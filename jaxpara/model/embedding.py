"""Token and position embeddings, and the head that may share the token table."""
from flax import nnx

from jaxpara.model.declare import declare


class Embedding(nnx.Module):
    def __init__(self, table, model):
        self.tokens = declare(table, "embedding.tokens")
        if model.style == "gpt2":
            self.positions = declare(table, "embedding.positions")

    def __call__(self, tokens, ctx):
        """tokens: int32 [b, s]. Returns [b, s, H] at a border."""
        x = ctx.embed(self.tokens[...], tokens)
        if hasattr(self, "positions"):
            x += self.positions[...][ctx.positions(border=True)]
        return x


class Head(nnx.Module):
    def __init__(self, table):
        self.weight = declare(table, "head.weight")
