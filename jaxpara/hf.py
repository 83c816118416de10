"""HuggingFace GPT-2 and Llama: their configurations as a `config.Model`, their weights under jaxpara's names. Neither torch nor transformers.

    hf_model = transformers.AutoModelForCausalLM.from_pretrained("openai-community/gpt2")
    model = model_of(hf_model.config)
    state = program.init(from_hf(hf_model.state_dict(), model))
    hf_model.load_state_dict({name: torch.from_numpy(array) for name, array in to_hf(program.params(state), model).items()})
"""
import re
from dataclasses import dataclass
from math import prod

import numpy as np

from jaxpara.config import Model, Run, resolve
from jaxpara.errors import ConfigError
from jaxpara.params import parameters, unstack

WEIGHTS = {
    # HuggingFace name ({}: the layer), jaxpara names (several: joined along the last dim there), dims of each here -> there, one letter a dim
    # (v vocab, p positions, h width, n heads, d head_dim, f ffn); letters written together there are one dim. GPT-2 stores [in, out].
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
BASE = {"gpt2": "transformer.", "llama": "model."}     # left out in checkpoints of the model without its head
BUFFERS = re.compile(r"\.attn\.(masked_)?bias$|\.inv_freq$")      # constants that older versions saved with the weights

FIELDS = {
    # jaxpara's field: HuggingFace's, and its default there (a saved config.json leaves defaults out). No dropout: HuggingFace's three
    # rates have no counterpart, so model.dropout stays 0.
    "gpt2": dict(layers=("n_layer", 12), width=("n_embd", 768), heads=("n_head", 12), ffn=("n_inner", None), vocab=("vocab_size", 50257),
                 tied=("tie_word_embeddings", True), norm_eps=("layer_norm_epsilon", 1e-5), max_positions=("n_positions", 1024)),
    "llama": dict(layers=("num_hidden_layers", 32), width=("hidden_size", 4096), heads=("num_attention_heads", 32),
                  kv_heads=("num_key_value_heads", None), head_dim=("head_dim", None), ffn=("intermediate_size", 11008),
                  vocab=("vocab_size", 32000), tied=("tie_word_embeddings", False), norm_eps=("rms_norm_eps", 1e-6),
                  max_positions=("max_position_embeddings", 2048)),
}
ONLY = {    # the one value of other fields that jaxpara's model computes, which is HuggingFace's default
    "gpt2": dict(activation_function="gelu_new", scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False,
                 reorder_and_upcast_attn=False, add_cross_attention=False),
    "llama": dict(hidden_act="silu", attention_bias=False, mlp_bias=False),
}


def model_of(hf_config):
    """Resolved `config.Model` of a GPT2Config or LlamaConfig, or of the dict in a config.json.

    Dropout rates are not mapped (model.dropout is 0). Raises ConfigError with every field whose value jaxpara's model cannot express.
    """
    read = hf_config.get if isinstance(hf_config, dict) else lambda field, default=None: getattr(hf_config, field, default)
    style = read("model_type")
    if style not in FIELDS:
        raise ConfigError(f"hf_config.model_type = {style!r}: jaxpara has no model of that type. Legal: {', '.join(FIELDS)}.")
    wrong = [f"hf_config.{field} = {read(field)!r}: jaxpara's {style} model has no such variant. Legal: {legal!r}."
             for field, legal in ONLY[style].items() if read(field, legal) != legal]
    values = {ours: read(field, default) for ours, (field, default) in FIELDS[style].items()}
    if style == "llama":
        values["rope_theta"], refusal = _rope(read)
        wrong += refusal
    if wrong:
        raise ConfigError(*wrong)
    return resolve(Run(model=Model(style=style, **values))).model


def _rope(read):
    """(theta, violations). transformers 5 has theta and scaling in rope_parameters, transformers 4 in rope_theta and rope_scaling."""
    field = "rope_parameters" if read("rope_parameters") else "rope_scaling"
    rope = read(field) or {}
    theta = rope.get("rope_theta") or read("rope_theta") or 10000.0
    kind = rope.get("rope_type", rope.get("type", "default"))
    return theta, [f"hf_config.{field} = {rope!r}: jaxpara does not scale rotary positions. Legal rope_type: default."] * (kind != "default")


def from_hf(state, model):
    """HuggingFace state dict {name: array or torch tensor} -> {dotted path: np.ndarray}, as `Program.init` takes and `Program.params` gives.

    Gradients by HuggingFace name pass as well. Copies; float32 and float64 keep their bits, 16-bit torch tensors become float32. Names
    may lack "transformer." or "model.", and buffers are passed over. Raises ConfigError with every missing and extra name and wrong shape.
    """
    base = BASE[model.style]
    bare = not any(name.startswith(base) for name in state)
    rows = {name.removeprefix(base) if bare else name: row for name, row in _rows(model).items()}
    given = {name: value for name, value in state.items() if not BUFFERS.search(name)}
    head = given.pop("lm_head.weight", None) if model.tied else None
    _compare(given, {name: row.shape for name, row in rows.items()}, "weight")
    if head is not None and not np.array_equal(_array(head), _array(given[next(iter(rows))])):
        raise ConfigError("lm_head.weight differs from the token embedding, and model.tied = True would drop it. Legal: model.tied = False.")
    return {path: part for name, row in rows.items() for path, part in zip(row.paths, row.split(_array(given[name])))}


def to_hf(params, model):
    """The inverse of `from_hf`: {HuggingFace name: np.ndarray}, whole, for `load_state_dict`; a tied head appears as lm_head.weight too."""
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
        return [self.here.index(letter) for letter in self.there if letter != " "]

    @property
    def shape(self):
        """There, all parts joined."""
        *rows, last = [prod(self.part[self.here.index(letter)] for letter in dim) for dim in self.there.split()]
        return (*rows, last * len(self.paths))

    def split(self, whole):
        shape = [self.part[dim] for dim in self.order]
        return [piece.reshape(shape).transpose(np.argsort(self.order)).copy() for piece in np.split(whole, len(self.paths), axis=-1)]

    def join(self, parts):
        shape = (*self.shape[:-1], -1)
        return np.concatenate([part.transpose(self.order).reshape(shape) for part in parts], axis=-1)


def _rows(model):
    """{HuggingFace name: Row} of a resolved model, the token embedding first."""
    if model.style == "gpt2" and model.kv_heads != model.heads:
        raise ConfigError(f"model.kv_heads = {model.kv_heads}: HuggingFace's gpt2 has as many KV heads as heads. Legal: {model.heads}.")
    if model.qk_norm:
        raise ConfigError("model.qk_norm = True: HuggingFace's llama has no norm of queries and keys. Legal: False.")
    shapes, rows = {p.name: p.shape[p.stacked:] for p in parameters(model)}, {}
    for template, names, dims in WEIGHTS[model.style]:
        names, (here, there) = names.split(), dims.split(" -> ")
        if names == ["head.weight"] and model.tied:
            continue
        for layer in range(model.layers if "{}" in template else 1):
            paths = tuple(unstack(name, layer) if "{}" in template else name for name in names)
            rows[template.format(layer)] = Row(paths, shapes[names[0]], here, there)
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
