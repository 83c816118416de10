"""The one table of a model's parameters: name, dims, labels, init. No JAX.

The nnx modules, the sharding rules, the plan and `explain` all read this table, so a parameter is declared once.
Every label names a dim of the whole model; no parameter uses a label twice.
"""
from dataclasses import dataclass
from math import ceil, prod


@dataclass(frozen=True)
class Parameter:
    name: str                   # dotted path; layers are stacked: layers.attention.query has a leading dim "layers"
    shape: tuple[int, ...]      # logical (unpadded) shape
    labels: tuple[str, ...]
    init: str                   # "normal", "zeros" or "ones"
    std: float = 0.0            # of "normal"
    of: tuple[int, ...] = ()    # the layers that have it, of a stacked one
    wide: bool = False          # kept and used in at least float32, whatever the run's precision

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

    @property
    def routed(self):
        """Whether its matmul sees tokens expert by expert, or decides which expert sees them."""
        return "experts" in self.labels or self.wide


def parameters(model):
    """The `Parameter`s of a resolved `config.Model`, in the order of the forward pass.

    Sizes: GPT-2 style 12LH²(1 + 13/(12H) + (V+S)/(12LH)) + 2H, Llama style
    L(2H·N_q·d + 2H·N_kv·d + 3H·H_ffn + 2H) + (1 or 2)VH + H (Narayanan et al. 2021, eq. 2, whose form leaves out the last norm).
    """
    embedding = [Parameter("embedding.tokens", (model.vocab, model.width), ("vocab", "width"), "normal", 0.02)]
    if model.style == "gpt2":
        embedding.append(Parameter("embedding.positions", (model.max_positions, model.width), ("positions", "width"), "normal", 0.01))
    layers = _stacked(_norm("norm1", model) + _attention(model) + _norm("norm2", model), range(model.layers))
    layers += _stacked(_mlp("mlp", model, model.ffn), layers_of(model, "dense")) + _stacked(_moe(model), layers_of(model, "moe"))
    head = [] if model.tied else [Parameter("head.weight", (model.vocab, model.width), ("vocab", "width"), "normal", 0.02)]
    return tuple(embedding + layers + _norm("norm", model) + head)


def kinds(model):
    """"moe" or "dense" for each layer: the last of every `moe.every` after the first `moe.first_dense` has experts."""
    moe = model.moe
    routed = lambda layer: moe.experts and layer >= moe.first_dense and (layer - moe.first_dense + 1) % moe.every == 0
    return tuple("moe" if routed(layer) else "dense" for layer in range(model.layers))


def layers_of(model, kind):
    """The layers whose feed-forward block is of this kind."""
    return tuple(layer for layer, found in enumerate(kinds(model)) if found == kind)


def choices(moe):
    """Experts that a token may be sent to: K; E where experts choose."""
    return moe.experts if moe.routing == "expert_choice" else moe.top_k


def capacity(moe, evaluation=False):
    """ceil(c·K·G/E) tokens that an expert takes of a group of G (Lepikhin et al. 2020, arXiv 2006.16668), at most G; None: dropless.

    Experts that choose take as many whatever eval_capacity says: that is their routing.
    """
    if moe.capacity is None or evaluation and not (moe.eval_capacity or moe.routing == "expert_choice"):
        return None
    return min(moe.group, ceil(round(moe.capacity * moe.top_k * moe.group / moe.experts, 6)))


def period(model):
    """Layers after which the kinds repeat."""
    return model.moe.every if model.moe.experts else 1


def segments(model, count):
    """[(kinds of the layers of one period, periods)] of the model's first `count` layers: what the program runs in one loop each."""
    found, moe = kinds(model)[:count], model.moe
    if "moe" not in found:
        return [(("dense",), count)]
    first = min(moe.first_dense, count)
    periods, rest = divmod(count - first, moe.every)
    cut = [(("dense",), first), (found[first:first + moe.every], periods), (("dense",), rest)]
    return [(kinds, repeats) for kinds, repeats in cut if repeats]


def _stacked(block, layers):
    """The parameters of one layer, stacked over `layers`; none for no layers."""
    layers = tuple(layers)
    return [Parameter(f"layers.{p.name}", (len(layers), *p.shape), ("layers", *p.labels), p.init, p.std, layers, p.wide) for p in block if layers]


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


def _mlp(name, model, inner, label="ffn", biased=True):
    width, exit_std = model.width, 0.02 / (2 * model.layers) ** 0.5
    up = Parameter(f"{name}.up", (width, inner), ("width", label), "normal", 0.02)
    down = Parameter(f"{name}.down", (inner, width), (label, "width"), "normal", exit_std)
    if model.style == "llama":
        return [Parameter(f"{name}.gate", (width, inner), ("width", label), "normal", 0.02), up, down]
    bias = lambda part, size, label: [Parameter(f"{name}.{part}_bias", (size,), (label,), "zeros")] * biased
    return [up, *bias("up", inner, label), down, *bias("down", width, "width")]


def _moe(model):
    """A router [H, E], its noise, E experts without biases, and one MLP for all shared experts."""
    moe = model.moe
    names = ["moe.router"] + ["moe.noise"] * moe.noise
    router = [Parameter(name, (model.width, moe.experts), ("width", "choices"), "normal", 0.02, wide=True) for name in names]
    experts = [Parameter(p.name, (moe.experts, *p.shape), ("experts", *p.labels), p.init, p.std)
               for p in _mlp("moe", model, moe.ffn, "expert_ffn", biased=False)]
    shared = _mlp("moe.shared", model, moe.shared * moe.ffn, "expert_ffn", biased=False) if moe.shared else []
    return router + experts + shared


def count(model):
    """Φ: number of parameters, vocabulary padding not included."""
    return sum(parameter.size for parameter in parameters(model))


def count_active(model):
    """Φ_act: parameters that one token meets, K of E experts in each layer that has them."""
    return sum(p.size * model.moe.top_k // model.moe.experts if "experts" in p.labels else p.size for p in parameters(model))


def unstack(name, layer):
    """layers.attention.query, 3 -> layers.3.attention.query."""
    return f"layers.{layer}.{name.removeprefix('layers.')}"


def padded_vocab(model, mesh):
    """Rows of the stored vocabulary tables: V rounded up to a multiple of tp."""
    return -(-model.vocab // mesh.tp) * mesh.tp
