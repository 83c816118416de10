"""The one table of a model's parameters: name, dims, labels, init. No JAX.

The nnx modules, the sharding rules, the plan and `explain` all read this table, so a parameter is declared once.
Every label names a dim of the whole model; no parameter uses a label twice.
"""
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Parameter:
    name: str                   # dotted path; layers are stacked: layers.attention.query has a leading dim "layers"
    shape: tuple[int, ...]      # logical (unpadded) shape
    labels: tuple[str, ...]
    init: str                   # "normal", "zeros" or "ones"
    std: float = 0.0            # of "normal"

    @property
    def stacked(self):
        return self.labels[0] == "layers"

    @property
    def size(self):
        return prod(self.shape)

    @property
    def matrix(self):
        """A weight of a matmul or an embedding: decayed by the optimizer, unlike norms and biases."""
        return self.init == "normal"


def parameters(model):
    """The `Parameter`s of a resolved `config.Model`, in the order of the forward pass.

    Sizes: GPT-2 style 12LH²(1 + 13/(12H) + (V+S)/(12LH)) + 2H, Llama style
    L(2H·N_q·d + 2H·N_kv·d + 3H·H_ffn + 2H) + (1 or 2)VH + H (Narayanan et al. 2021, eq. 2, whose form leaves out the last norm).
    """
    embedding = [Parameter("embedding.tokens", (model.vocab, model.width), ("vocab", "width"), "normal", 0.02)]
    if model.style == "gpt2":
        embedding.append(Parameter("embedding.positions", (model.max_positions, model.width), ("positions", "width"), "normal", 0.01))
    block = _norm("norm1", model) + _attention(model) + _norm("norm2", model) + _mlp(model)
    layers = [Parameter(f"layers.{p.name}", (model.layers, *p.shape), ("layers", *p.labels), p.init, p.std) for p in block]
    head = [] if model.tied else [Parameter("head.weight", (model.vocab, model.width), ("vocab", "width"), "normal", 0.02)]
    return tuple(embedding + layers + _norm("norm", model) + head)


def _norm(name, model):
    scale = [Parameter(f"{name}.scale", (model.width,), ("width",), "ones")]
    bias = [Parameter(f"{name}.bias", (model.width,), ("width",), "zeros")]
    return scale + bias if model.style == "gpt2" else scale


def _attention(model):
    width, queries, keys, dim = model.width, model.heads, model.kv_heads, model.head_dim
    exit_std = 0.02 / (2 * model.layers) ** 0.5     # GPT-2: the residual stream sums 2L exits
    table = [
        Parameter("attention.query", (width, queries, dim), ("width", "heads", "head_dim"), "normal", 0.02),
        Parameter("attention.key", (width, keys, dim), ("width", "kv_heads", "head_dim"), "normal", 0.02),
        Parameter("attention.value", (width, keys, dim), ("width", "kv_heads", "head_dim"), "normal", 0.02),
        Parameter("attention.output", (queries, dim, width), ("heads", "head_dim", "width"), "normal", exit_std),
    ]
    if model.style == "gpt2":
        table += [
            Parameter("attention.query_bias", (queries, dim), ("heads", "head_dim"), "zeros"),
            Parameter("attention.key_bias", (keys, dim), ("kv_heads", "head_dim"), "zeros"),
            Parameter("attention.value_bias", (keys, dim), ("kv_heads", "head_dim"), "zeros"),
            Parameter("attention.output_bias", (width,), ("width",), "zeros"),
        ]
    if model.qk_norm:
        table += [Parameter(f"attention.{name}_scale", (dim,), ("head_dim",), "ones") for name in ("query", "key")]
    return table


def _mlp(model):
    width, inner, exit_std = model.width, model.ffn, 0.02 / (2 * model.layers) ** 0.5
    up = Parameter("mlp.up", (width, inner), ("width", "ffn"), "normal", 0.02)
    down = Parameter("mlp.down", (inner, width), ("ffn", "width"), "normal", exit_std)
    if model.style == "gpt2":
        return [up, Parameter("mlp.up_bias", (inner,), ("ffn",), "zeros"), down, Parameter("mlp.down_bias", (width,), ("width",), "zeros")]
    return [Parameter("mlp.gate", (width, inner), ("width", "ffn"), "normal", 0.02), up, down]


def count(model):
    """Φ: number of parameters, vocabulary padding not included."""
    return sum(parameter.size for parameter in parameters(model))


def unstack(name, layer):
    """layers.attention.query, 3 -> layers.3.attention.query."""
    return f"layers.{layer}.{name.removeprefix('layers.')}"


def padded_vocab(model, mesh):
    """Rows of the stored vocabulary tables: V rounded up to a multiple of tp."""
    return -(-model.vocab // mesh.tp) * mesh.tp
