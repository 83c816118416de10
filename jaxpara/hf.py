"""HuggingFace GPT-2, Llama, Mixtral and Qwen3-MoE: their configurations as a `config.Model`, their weights under jaxpara's names.

Neither torch nor transformers is needed.

    hf_model = transformers.AutoModelForCausalLM.from_pretrained("openai-community/gpt2")
    model = model_of(hf_model.config)
    state = program.init(from_hf(hf_model.state_dict(), model))
    hf_model.load_state_dict({name: torch.from_numpy(array) for name, array in to_hf(program.params(state), model).items()})
"""
import re
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from jaxpara.config import Model, MoE, Run, resolve
from jaxpara.errors import ConfigError
from jaxpara.params import kinds, parameters, unstack

WEIGHTS = {
    # HuggingFace name ({}: the layer), jaxpara names (several: joined there along the dim marked +, else the last), dims of each here -> there,
    # one letter a dim (v vocab, p positions, h width, n heads, d head_dim, f ffn, e experts); letters written together there are one dim.
    # A row whose parameter the model lacks is left out. GPT-2 stores [in, out].
    "gpt2": (
        ("transformer.wte.weight", "embedding.tokens", "vh -> v h"),
        ("transformer.wpe.weight", "embedding.positions", "ph -> p h"),
        ("transformer.h.{}.ln_1.weight", "layers.norm1.scale", "h -> h"),
        ("transformer.h.{}.ln_1.bias", "layers.norm1.bias", "h -> h"),
        ("transformer.h.{}.attn.c_attn.weight", "layers.attention.query layers.attention.key layers.attention.value", "hnd -> h nd"),
        ("transformer.h.{}.attn.c_attn.bias", "layers.attention.query_bias layers.attention.key_bias layers.attention.value_bias", "nd -> nd"),
        ("transformer.h.{}.attn.c_proj.weight", "layers.attention.output", "ndh -> nd h"),
        ("transformer.h.{}.attn.c_proj.bias", "layers.attention.output_bias", "h -> h"),
        ("transformer.h.{}.ln_2.weight", "layers.norm2.scale", "h -> h"),
        ("transformer.h.{}.ln_2.bias", "layers.norm2.bias", "h -> h"),
        ("transformer.h.{}.mlp.c_fc.weight", "layers.mlp.up", "hf -> h f"),
        ("transformer.h.{}.mlp.c_fc.bias", "layers.mlp.up_bias", "f -> f"),
        ("transformer.h.{}.mlp.c_proj.weight", "layers.mlp.down", "fh -> f h"),
        ("transformer.h.{}.mlp.c_proj.bias", "layers.mlp.down_bias", "h -> h"),
        ("transformer.ln_f.weight", "norm.scale", "h -> h"),
        ("transformer.ln_f.bias", "norm.bias", "h -> h"),
        ("lm_head.weight", "head.weight", "vh -> v h"),
    ),
    "llama": (      # stores [out, in]; both rotate halves of a head against each other, so no rows are exchanged
        ("model.embed_tokens.weight", "embedding.tokens", "vh -> v h"),
        ("model.layers.{}.input_layernorm.weight", "layers.norm1.scale", "h -> h"),
        ("model.layers.{}.self_attn.q_proj.weight", "layers.attention.query", "hnd -> nd h"),
        ("model.layers.{}.self_attn.k_proj.weight", "layers.attention.key", "hnd -> nd h"),
        ("model.layers.{}.self_attn.v_proj.weight", "layers.attention.value", "hnd -> nd h"),
        ("model.layers.{}.self_attn.o_proj.weight", "layers.attention.output", "ndh -> h nd"),
        ("model.layers.{}.post_attention_layernorm.weight", "layers.norm2.scale", "h -> h"),
        ("model.layers.{}.mlp.gate_proj.weight", "layers.mlp.gate", "hf -> f h"),
        ("model.layers.{}.mlp.up_proj.weight", "layers.mlp.up", "hf -> f h"),
        ("model.layers.{}.mlp.down_proj.weight", "layers.mlp.down", "fh -> h f"),
        ("model.norm.weight", "norm.scale", "h -> h"),
        ("lm_head.weight", "head.weight", "vh -> v h"),
    ),
}
WEIGHTS["mixtral"] = (      # the router is called gate
    *WEIGHTS["llama"],
    ("model.layers.{}.mlp.gate.weight", "layers.moe.router", "he -> e h"),
    ("model.layers.{}.mlp.experts.gate_up_proj", "layers.moe.gate layers.moe.up", "ehf -> e f+ h"),
    ("model.layers.{}.mlp.experts.down_proj", "layers.moe.down", "efh -> e h f"),
)
WEIGHTS["qwen3_moe"] = (
    *WEIGHTS["mixtral"],
    ("model.layers.{}.self_attn.q_norm.weight", "layers.attention.query_scale", "d -> d"),
    ("model.layers.{}.self_attn.k_norm.weight", "layers.attention.key_scale", "d -> d"),
)
BY_EXPERT = {   # instead of the rows of layers.moe, in files and in transformers 4: one weight an expert, the second {}, whose e is 1
    "mixtral": (
        ("model.layers.{}.block_sparse_moe.gate.weight", "layers.moe.router", "he -> e h"),
        ("model.layers.{}.block_sparse_moe.experts.{}.w1.weight", "layers.moe.gate", "ehf -> ef h"),
        ("model.layers.{}.block_sparse_moe.experts.{}.w3.weight", "layers.moe.up", "ehf -> ef h"),
        ("model.layers.{}.block_sparse_moe.experts.{}.w2.weight", "layers.moe.down", "efh -> eh f"),
    ),
    "qwen3_moe": (
        ("model.layers.{}.mlp.gate.weight", "layers.moe.router", "he -> e h"),
        ("model.layers.{}.mlp.experts.{}.gate_proj.weight", "layers.moe.gate", "ehf -> ef h"),
        ("model.layers.{}.mlp.experts.{}.up_proj.weight", "layers.moe.up", "ehf -> ef h"),
        ("model.layers.{}.mlp.experts.{}.down_proj.weight", "layers.moe.down", "efh -> eh f"),
    ),
}
EXPERT = re.compile(r"\.experts\.\d+\.")
BASE = {"gpt2": "transformer.", "llama": "model."}     # left out in checkpoints of the model without its head
BUFFERS = re.compile(r"\.attn\.(masked_)?bias$|\.inv_freq$")      # constants that older versions saved with the weights

FIELDS = {
    # jaxpara's field: HuggingFace's (several: the first that is there), and its default there (a saved config.json leaves defaults out). No
    # dropout: HuggingFace's three rates have no counterpart, so model.dropout stays 0.
    "gpt2": dict(layers=("n_layer", 12), width=("n_embd", 768), heads=("n_head", 12), ffn=("n_inner", None), vocab=("vocab_size", 50257),
                 tied=("tie_word_embeddings", True), norm_eps=("layer_norm_epsilon", 1e-5), max_positions=("n_positions", 1024)),
    "llama": dict(layers=("num_hidden_layers", 32), width=("hidden_size", 4096), heads=("num_attention_heads", 32),
                  kv_heads=("num_key_value_heads", None), head_dim=("head_dim", None), ffn=("intermediate_size", 11008),
                  vocab=("vocab_size", 32000), tied=("tie_word_embeddings", False), norm_eps=("rms_norm_eps", 1e-6),
                  max_positions=("max_position_embeddings", 2048)),
}
FIELDS["mixtral"] = FIELDS["llama"] | dict(
    kv_heads=("num_key_value_heads", 8), ffn=("intermediate_size", 14336), norm_eps=("rms_norm_eps", 1e-5),
    max_positions=("max_position_embeddings", 131072), window=("sliding_window", None))
FIELDS["qwen3_moe"] = FIELDS["llama"] | dict(
    layers=("num_hidden_layers", 24), width=("hidden_size", 2048), kv_heads=("num_key_value_heads", 4), ffn=("intermediate_size", 6144),
    vocab=("vocab_size", 151936), max_positions=("max_position_embeddings", 32768), window=("sliding_window", 4096))
MOE_FIELDS = {      # of model.moe; transformers 5 writes Qwen3's num_experts as num_local_experts
    "mixtral": dict(experts=("num_local_experts", 8), top_k=("num_experts_per_tok", 2)),
    "qwen3_moe": dict(experts=("num_experts num_local_experts", 128), top_k=("num_experts_per_tok", 8), ffn=("moe_intermediate_size", 768),
                      every=("decoder_sparse_step", 1), renormalise=("norm_topk_prob", False)),
}
THETA = {"llama": 10000.0, "mixtral": 1e6, "qwen3_moe": 10000.0}
ONLY = {    # the one value of other fields that jaxpara's model computes, which is HuggingFace's default
    "gpt2": dict(activation_function="gelu_new", scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False,
                 reorder_and_upcast_attn=False, add_cross_attention=False),
    "llama": dict(hidden_act="silu", attention_bias=False, mlp_bias=False),
    "mixtral": dict(hidden_act="silu"),
    "qwen3_moe": dict(hidden_act="silu", attention_bias=False),
}
ONLY_MOE = dict(    # the other way: the one value of model.moe's fields that both families compute; those of training alone are free
    routing="token_choice", score="softmax", scale=1.0, expert_groups=1, shared=0, bias_rate=0.0, noise=False, eval_capacity=False)


def model_of(hf_config):
    """Resolved `config.Model` of a GPT2Config, LlamaConfig, MixtralConfig or Qwen3MoeConfig, or of the dict in a config.json.

    Choices of training are not mapped: dropout rates, router jitter and the weight of the load-balance loss are 0, moe.group is left to
    train.seq. Raises ConfigError with every field whose value jaxpara's model cannot express.
    """
    read = hf_config.get if isinstance(hf_config, dict) else lambda field, default=None: getattr(hf_config, field, default)
    family = read("model_type")
    if family not in FIELDS:
        raise ConfigError(f"hf_config.model_type = {family!r}: jaxpara has no model of that type. Legal: {', '.join(FIELDS)}.")
    wrong = [f"hf_config.{field} = {read(field)!r}: jaxpara's {family} model has no such variant. Legal: {legal!r}."
             for field, legal in ONLY[family].items() if read(field, legal) != legal]
    values = _values(read, FIELDS[family])
    style = "gpt2" if family == "gpt2" else "llama"
    if style == "llama":
        values["rope_theta"], refusal = _rope(read, THETA[family])
        wrong += refusal
    if family == "qwen3_moe":
        values |= dict(qk_norm=True, window=values["window"] if read("use_sliding_window", False) else None)
    if family in MOE_FIELDS:
        values["moe"], refusal = _moe(read, family, values["layers"])
        wrong += refusal
    if wrong:
        raise ConfigError(*wrong)
    model = resolve(Run(model=Model(style=style, **values))).model
    return replace(model, moe=replace(model.moe, group=None))      # resolved from a train.seq that is nobody's


def _values(read, fields):
    """{jaxpara's field: value} of a table such as `FIELDS[family]`."""
    def value(names, default):
        return next((read(name) for name in names.split() if read(name, fields) is not fields), default)
    return {ours: value(*theirs) for ours, theirs in fields.items()}


def _moe(read, family, layers):
    """(`config.MoE`, violations)."""
    moe = MoE(**_values(read, MOE_FIELDS[family]))
    if not moe.experts:
        field = MOE_FIELDS[family]["experts"][0].split()[0]
        return moe, [f"hf_config.{field} = 0: jaxpara's {family} model has experts. Legal: 1 or more."]
    dense = (read("mlp_only_layers") or []) if family == "qwen3_moe" else []
    theirs = tuple("dense" if layer in dense or (layer + 1) % moe.every else "moe" for layer in range(layers))
    for first in range(layers + 1):
        found = replace(moe, first_dense=first)
        if kinds(Model(layers=layers, moe=found)) == theirs:
            return found, []
    return moe, [f"hf_config.mlp_only_layers = {dense!r} with decoder_sparse_step = {moe.every}: jaxpara's model has extra dense layers only at "
                 f"the start. Legal: [], [0], [0, 1] and so on."]


def _rope(read, theta):
    """(theta, violations). transformers 5 has theta and scaling in rope_parameters, transformers 4 in rope_theta and rope_scaling."""
    field = "rope_parameters" if read("rope_parameters") else "rope_scaling"
    rope = read(field) or {}
    theta = rope.get("rope_theta") or read("rope_theta") or theta
    kind = rope.get("rope_type", rope.get("type", "default"))
    return theta, [f"hf_config.{field} = {rope!r}: jaxpara does not scale rotary positions. Legal rope_type: default."] * (kind != "default")


def from_hf(state, model):
    """HuggingFace state dict {name: array or torch tensor} -> {dotted path: np.ndarray}, as `Program.init` takes and `Program.params` gives.

    Gradients by HuggingFace name pass as well. Copies; float32 and float64 keep their bits, 16-bit torch tensors become float32. Names
    may lack "transformer." or "model.", buffers are passed over, and experts may be one by one, as in files, or stacked, as in transformers 5.
    Raises ConfigError with every missing and extra name and wrong shape.
    """
    base = BASE[model.style]
    bare = not any(name.startswith(base) for name in state)
    rows = {name.removeprefix(base) if bare else name: row for name, row in _rows(model, any(map(EXPERT.search, state))).items()}
    given = {name: value for name, value in state.items() if not BUFFERS.search(name)}
    head = given.pop("lm_head.weight", None) if model.tied else None
    _compare(given, {name: row.shape for name, row in rows.items()}, "weight")
    if head is not None and not np.array_equal(_array(head), _array(given[next(iter(rows))])):
        raise ConfigError("lm_head.weight differs from the token embedding, and model.tied = True would drop it. Legal: model.tied = False.")
    parts = {}
    for name, row in rows.items():
        for path, part in zip(row.paths, row.split(_array(given[name]))):
            parts.setdefault(path, []).append(part)
    whole = lambda pieces: pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    return {path: whole(parts.pop(path)) for path in list(parts)}       # popped: no second copy of all experts


def to_hf(params, model):
    """The inverse of `from_hf`: {HuggingFace name: np.ndarray}, whole, for `load_state_dict`; a tied head appears as lm_head.weight too.

    Experts are stacked, as in transformers 5; those without qk_norm are a Mixtral, those with it a Qwen3-MoE.
    """
    rows = _rows(model)
    _compare(params, {path: row.part for row in rows.values() for path in row.paths}, "parameter")
    state = {name: row.join([_array(params[path]) for path in row.paths]) for name, row in rows.items()}
    return state | {"lm_head.weight": next(iter(state.values())).copy()} if model.tied else state


@dataclass(frozen=True)
class Row:
    """One HuggingFace weight: the paths of its parts here, their shape, and the dims here and there (see `WEIGHTS`)."""
    paths: tuple[str, ...]
    part: tuple[int, ...]
    here: str
    there: str

    @property
    def order(self):
        """For each dim there, its number here."""
        return [self.here.index(letter) for letter in self.there if letter.isalpha()]

    @property
    def axis(self):
        """The dim there along which parts are joined."""
        dims = self.there.split()
        return next((axis for axis, dim in enumerate(dims) if "+" in dim), len(dims) - 1)

    @property
    def shape(self):
        """There, all parts joined."""
        sizes = [prod(self.part[self.here.index(letter)] for letter in dim if letter.isalpha()) for dim in self.there.split()]
        sizes[self.axis] *= len(self.paths)
        return tuple(sizes)

    def split(self, whole):
        shape = [self.part[dim] for dim in self.order]
        return [piece.reshape(shape).transpose(np.argsort(self.order)).copy() for piece in np.split(whole, len(self.paths), axis=self.axis)]

    def join(self, parts):
        shape = [-1 if axis == self.axis else size for axis, size in enumerate(self.shape)]
        return np.concatenate([part.transpose(self.order).reshape(shape) for part in parts], axis=self.axis)


def _family(model):
    """The HuggingFace family of a resolved model; ConfigError with all that it cannot express."""
    moe, wrong = model.moe, []
    family = model.style if not moe.experts else "qwen3_moe" if model.qk_norm else "mixtral"
    if model.style == "gpt2" and model.kv_heads != model.heads:
        wrong.append(f"model.kv_heads = {model.kv_heads}: HuggingFace's gpt2 has as many KV heads as heads. Legal: {model.heads}.")
    if model.qk_norm and not moe.experts:
        wrong.append("model.qk_norm = True: HuggingFace's llama has no norm of queries and keys. Legal: False.")
    if moe.experts:
        if model.style != "llama":
            wrong.append(f"model.style = {model.style!r} with model.moe.experts = {moe.experts}: HuggingFace has no such model. Legal: 'llama'.")
        only = ONLY_MOE | (dict(renormalise=True) if family == "mixtral" else {})
        wrong += [f"model.moe.{field} = {getattr(moe, field)!r}: HuggingFace's {family} has no such variant. Legal: {legal!r}."
                  for field, legal in only.items() if getattr(moe, field) != legal]
        if family == "mixtral" and "dense" in kinds(model):
            wrong.append(f"model.moe.every = {moe.every}, first_dense = {moe.first_dense}: HuggingFace's mixtral has experts in every layer. "
                         f"Legal: 1, 0.")
    if wrong:
        raise ConfigError(*wrong)
    return family


def _rows(model, by_expert=False):
    """{HuggingFace name: Row} of a resolved model, the token embedding first. by_expert: with one weight for each expert, where there are any."""
    family, table, rows = _family(model), {p.name: p for p in parameters(model)}, {}
    weights = WEIGHTS[family]
    if by_expert and family in BY_EXPERT:
        weights = [row for row in weights if not row[1].startswith("layers.moe.")] + list(BY_EXPERT[family])
    for template, names, dims in weights:
        names, (here, there) = names.split(), dims.split(" -> ")
        parameter = table.get(names[0])
        if parameter is None:
            continue
        shape, single = parameter.shape[parameter.stacked:], template.count("{}") == 2
        for layer in parameter.of or (None,):
            paths = tuple(unstack(name, layer) if parameter.stacked else name for name in names)
            for expert in range(model.moe.experts if single else 1):
                rows[template.format(layer, expert)] = Row(paths, (1, *shape[1:]) if single else shape, here, there)
    return rows


def _compare(given, shapes, what):
    """Raise ConfigError with all names of `given` that are missing, unknown or of another shape than shapes[name]."""
    differ = [f"{name} {tuple(given[name].shape)}, not {shape}" for name, shape in shapes.items()
              if name in given and tuple(given[name].shape) != shape]
    found = {f"Missing {what}s": [f"{name} {shape}" for name, shape in shapes.items() if name not in given],
             f"Extra {what}s, for which the model has no place": [name for name in given if name not in shapes],
             f"Wrong shapes of {what}s": differ}
    if any(found.values()):
        raise ConfigError(*[f"{title} ({len(names)}): {', '.join(names)}." for title, names in found.items() if names])


def _array(value):
    """numpy array of an array or of a torch tensor on any device."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value if str(value.dtype) in ("torch.float32", "torch.float64") else value.float()
        return value.numpy()
    return np.asarray(value)
