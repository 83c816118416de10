"""The outside reference: random HuggingFace GPT-2 and Llama against jaxpara, for the same weights through `jaxpara.hf`."""
import copy
import subprocess
import sys
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest

import jaxpara
from jaxpara import hf
from jaxpara.config import Model, Run, resolve
from jaxpara.errors import ConfigError
from jaxpara.settings import configure

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from transformers.models.llama import modeling_llama      # noqa: E402 (only where transformers is)

BATCH, SEQ = 4, 16
TOKENS = dict(bos_token_id=1, eos_token_id=2)
LLAMA = dict(vocab_size=53, hidden_size=20, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
             intermediate_size=56, max_position_embeddings=40, rms_norm_eps=1e-3, rope_parameters=dict(rope_type="default", rope_theta=50.0))
CONFIGS = {      # vocabularies that tp = 2 does not divide; eps and theta such that another value would show
    "gpt2": transformers.GPT2Config(vocab_size=37, n_positions=40, n_embd=24, n_layer=3, n_head=4, n_inner=88, layer_norm_epsilon=1e-3,
                                    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **TOKENS),
    "llama": transformers.LlamaConfig(**LLAMA, **TOKENS),
    "llama_tied": transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True, **TOKENS),
    "gpt2_untied": transformers.GPT2Config(vocab_size=37, n_positions=40, n_embd=24, n_layer=3, n_head=4, tie_word_embeddings=False, **TOKENS),
}
MESHES = {
    "one_device": {},
    "fsdp2_sp2_tp2": {"mesh.fsdp": 2, "mesh.sp": 2, "mesh.tp": 2, "parallel.sp_kind": "ring", "parallel.sp_order": "zigzag",
                      "parallel.tp_sequence": True},
}


class WideTorch:
    """torch, with float64 under the name of float32: HuggingFace's Llama computes norms, softmax and RoPE in what it calls float32."""
    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def build_hf(config):
    """float64 model with eager attention; every weight drawn anew, norms and biases too, with values that float32 holds exactly."""
    module = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").double().eval()
    rng = np.random.default_rng(7)
    for name, weight in module.named_parameters():
        norm = name.endswith("weight") and weight.ndim == 1
        value = norm + rng.normal(0, 0.3 if weight.ndim == 1 else 0.2, weight.shape)
        weight.data.copy_(torch.from_numpy(value.astype(np.float32)))
    return module


@lru_cache
def batch_of(vocab):
    """int32 [B, S] tokens and targets; some targets are not counted, not equally many in each row."""
    rng = np.random.default_rng(3)
    tokens, targets = rng.integers(0, vocab, (2, BATCH, SEQ), dtype=np.int32)
    targets[rng.random(targets.shape) < np.array([[0.0], [0.2], [0.9], [0.4]])] = -1
    return {"tokens": tokens, "targets": targets}


@lru_cache
def reference(name, wide=False):
    """What HuggingFace gives: state (arrays by name), logits, loss, gradients under jaxpara's names. wide: in float64 throughout."""
    config, model = CONFIGS[name], hf.model_of(CONFIGS[name])
    batch = {key: torch.from_numpy(value).long() for key, value in batch_of(config.vocab_size).items()}
    with pytest.MonkeyPatch.context() as patch:
        if wide:
            patch.setattr(modeling_llama, "torch", WideTorch())
        module = build_hf(config)
        logits = module(batch["tokens"], use_cache=False).logits
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=-1, reduction="sum")
        loss = total / (batch["targets"] != -1).sum()
        loss.backward()
    return SimpleNamespace(config=config, model=model, state={key: value.numpy().copy() for key, value in module.state_dict().items()},
                           logits=logits.detach().numpy(), loss=loss.item(),
                           grads=hf.from_hf({key: value.grad for key, value in module.named_parameters()}, model))


@pytest.fixture(scope="module")
def ours(request):
    """One program of jaxpara, compiled once for all tests of a case (name, mesh, dtype), with HuggingFace's weights in it."""
    name, mesh, dtype = request.param
    return compiled(name, hf.model_of(CONFIGS[name]), MESHES[mesh], dtype, reference(name).state)


def compiled(name, model, mesh, dtype, state):
    """What a test needs of one program: `result(params)`, and `real`, with HuggingFace's weights. mesh: settings; state: HuggingFace's."""
    run = configure(Run(model=model), {**mesh, "train.batch": BATCH, "train.seq": SEQ, "precision.params": dtype,
                                       "precision.compute": dtype})
    program, batch = jaxpara.build(run), batch_of(model.vocab)

    def result(params):
        state = program.init(params)
        loss, grads = program.loss_and_grads(state, batch)
        return SimpleNamespace(logits=program.logits(state, batch), loss=loss, grads=grads, params=program.params(state))

    return SimpleNamespace(name=name, dtype=dtype, model=model, result=result, real=result(hf.from_hf(state, model)))


def case(name, mesh="one_device", dtype="float64"):
    return pytest.param((name, mesh, dtype), id=f"{name}-{mesh}-{dtype}")


CASES = [case(name, mesh) for name in ("gpt2", "llama", "llama_tied") for mesh in MESHES]
CASES += [case(name, mesh, "float32") for name in ("gpt2", "llama") for mesh in MESHES]
ALONE = [case("gpt2"), case("llama")]


def errors(got, want):
    """(logits, loss, worst gradient leaf): the first two absolute, a leaf relative to its largest value or 1e-3 of the largest of all."""
    floor = 1e-3 * max(np.abs(leaf).max() for leaf in want.grads.values())
    assert got.grads.keys() == want.grads.keys()
    worst = max(np.abs(got.grads[name] - leaf).max() / max(np.abs(leaf).max(), floor) for name, leaf in want.grads.items())
    return np.abs(got.logits - want.logits).max(), abs(got.loss - want.loss), worst


@pytest.mark.parametrize("ours", CASES, indirect=True)
def test_hf_as_it_is(ours, record_property):
    logits, loss, grads = errors(ours.real, reference(ours.name))
    record_property("errors", f"logits {logits:.1e}, loss {loss:.1e}, gradients {grads:.1e}")
    assert logits < 1e-5 and loss < 1e-5 and grads < 1e-4, (logits, loss, grads)
    assert ours.real.logits.dtype == ours.dtype and {leaf.dtype for leaf in ours.real.grads.values()} == {np.dtype(ours.dtype)}


@pytest.mark.parametrize("ours", [param for param in CASES if param.values[0][2] == "float64"], indirect=True)
def test_hf_in_float64_throughout(ours, record_property):
    logits, loss, grads = errors(ours.real, reference(ours.name, wide=True))
    record_property("errors", f"logits {logits:.1e}, loss {loss:.1e}, gradients {grads:.1e}")
    assert logits < 1e-12 and loss < 1e-12 and grads < 1e-11, (logits, loss, grads)


def test_hf_reference_has_something_to_show():
    """Logits of ordinary size, so that an absolute limit means something, and no gradient leaf so small that it is compared with the
    floor, but GPT-2's key bias, which softmax does not see."""
    for name in ("gpt2", "llama", "llama_tied"):
        want = reference(name)
        assert 1 < np.abs(want.logits).max() < 20
        floor = 1e-3 * max(np.abs(leaf).max() for leaf in want.grads.values())
        assert {path.split(".", 2)[-1] for path, leaf in want.grads.items() if np.abs(leaf).max() < floor} <= {"attention.key_bias"}


FAULTS = {      # HuggingFace name -> row of hf.WEIGHTS instead of the right one
    "gpt2": [("attn.c_attn.weight", "layers.attention.key layers.attention.query layers.attention.value", "hnd -> h nd"),
             ("attn.c_attn.bias", "layers.attention.query_bias layers.attention.value_bias layers.attention.key_bias", "nd -> nd"),
             ("attn.c_attn.weight", "layers.attention.query layers.attention.key layers.attention.value", "hnd -> h dn"),
             ("attn.c_proj.weight", "layers.attention.output", "ndh -> h nd"),
             ("ln_1.bias ln_2.bias", "layers.norm2.bias layers.norm1.bias", "h -> h")],
    "llama": [("self_attn.q_proj.weight", "layers.attention.query", "hnd -> dn h"),
              ("self_attn.k_proj.weight self_attn.v_proj.weight", "layers.attention.value layers.attention.key", "hnd -> nd h"),
              ("self_attn.o_proj.weight", "layers.attention.output", "ndh -> h dn"),
              ("mlp.gate_proj.weight mlp.up_proj.weight", "layers.mlp.up layers.mlp.gate", "hf -> f h"),
              ("input_layernorm.weight post_attention_layernorm.weight", "layers.norm2.scale layers.norm1.scale", "h -> h")],
}


def planted(style, fault):
    """hf.WEIGHTS[style] with some rows replaced: one row with all the fault's names, or one row per HuggingFace name."""
    theirs, names, dims = fault
    theirs, names = theirs.split(), names.split()
    swap = dict(zip(theirs, [" ".join(names)] if len(theirs) == 1 else names))
    ends = lambda name: next((end for end in swap if name.endswith("." + end)), None)
    return tuple((name, swap[ends(name)], dims) if ends(name) else (name, *rest) for name, *rest in hf.WEIGHTS[style])


@pytest.mark.parametrize("ours", ALONE, indirect=True)
def test_hf_planted_faults_show(ours, monkeypatch):
    """Weights read through a wrong map; the comparison with the right one fails in the logits, the loss and the gradients."""
    want = reference(ours.name)
    for fault in FAULTS[ours.name]:
        with monkeypatch.context() as patch:
            patch.setitem(hf.WEIGHTS, ours.name, planted(ours.name, fault))
            wrong = hf.from_hf(want.state, ours.model)
            grads = hf.from_hf(hf.to_hf(want.grads, ours.model), ours.model)
        assert any(not np.array_equal(wrong[path], ours.real.params[path]) for path in wrong), fault
        logits, loss, worst = errors(ours.result(wrong), SimpleNamespace(logits=want.logits, loss=want.loss, grads=grads))
        assert logits > 1e-2 and loss > 1e-4 and worst > 1e-2, (fault, logits, loss, worst)


@pytest.mark.parametrize("name", CONFIGS)
def test_hf_round_trip_is_bitwise(name):
    """There and back gives the state dict, names and bits; back and there gives jaxpara's; and HuggingFace takes the result."""
    module = build_hf(CONFIGS[name])
    model, state = hf.model_of(module.config), module.state_dict()
    params = hf.from_hf(state, model)
    again = hf.to_hf(params, model)
    assert again.keys() == state.keys()
    assert all(value.dtype == np.float64 and np.array_equal(value, state[key].numpy()) for key, value in again.items())
    back = hf.from_hf(again, model)
    assert back.keys() == params.keys() and all(np.array_equal(back[path], params[path]) for path in params)
    other = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).double()
    other.load_state_dict({key: torch.from_numpy(value) for key, value in again.items()})
    assert all(torch.equal(value, state[key]) for key, value in other.state_dict().items())
    with torch.no_grad():
        next(module.parameters()).zero_()
    assert params["embedding.tokens"].any() and all(value.flags.c_contiguous and value.flags.owndata for value in params.values())


@pytest.mark.parametrize("ours", [case("gpt2", "fsdp2_sp2_tp2"), case("llama", "fsdp2_sp2_tp2")], indirect=True)
def test_hf_weights_come_back_from_a_program(ours):
    again = hf.to_hf(ours.real.params, ours.model)
    state = reference(ours.name).state
    assert again.keys() == state.keys() and all(np.array_equal(again[key], state[key]) for key in state)


def test_hf_state_dicts_in_the_wild():
    """Names without the base prefix, saved buffers, no head where it is tied, 16-bit tensors: all as released checkpoints have them."""
    for name, extra in (("gpt2", {"h.0.attn.bias": np.ones((1, 1, 40, 40)), "h.2.attn.masked_bias": np.float32(-1e4)}),
                        ("llama", {"layers.1.self_attn.rotary_emb.inv_freq": np.ones(3)})):
        want = reference(name)
        bare = {key.removeprefix(hf.BASE[name]): value for key, value in want.state.items()} | extra
        if name == "gpt2":
            del bare["lm_head.weight"]
        got, expected = hf.from_hf(bare, want.model), hf.from_hf(want.state, want.model)
        assert got.keys() == expected.keys() and all(np.array_equal(got[path], expected[path]) for path in got)
    rounded = hf.from_hf({key: torch.from_numpy(value).bfloat16() for key, value in want.state.items()}, want.model)
    assert all(value.dtype == np.float32 for value in rounded.values())
    np.testing.assert_allclose(rounded["norm.scale"], expected["norm.scale"], rtol=2 ** -8)


def test_hf_names_and_shapes_that_are_wrong_are_all_listed():
    want = reference("llama")
    state = dict(want.state) | {"model.layers.3.mlp.up_proj.weight": np.zeros((56, 20)), "score.weight": np.zeros(2)}
    del state["lm_head.weight"], state["model.layers.1.self_attn.q_proj.weight"]
    state["model.layers.2.mlp.down_proj.weight"] = state["model.layers.2.mlp.down_proj.weight"].T
    with pytest.raises(ConfigError) as caught:
        hf.from_hf(state, want.model)
    assert caught.value.violations == (
        "Missing weights (2): model.layers.1.self_attn.q_proj.weight (24, 20), lm_head.weight (53, 20).",
        "Extra weights, for which the model has no place (2): model.layers.3.mlp.up_proj.weight, score.weight.",
        "Wrong shapes of weights (1): model.layers.2.mlp.down_proj.weight (56, 20), not (20, 56).")
    params = hf.from_hf(want.state, want.model)
    params["layers.0.attention.query_scale"] = params.pop("norm.scale")
    with pytest.raises(ConfigError, match=r"(?s)Missing parameters \(1\): norm.scale \(20,\).*Extra parameters.*layers.0.attention.query_scale"):
        hf.to_hf(params, want.model)


def test_hf_models_that_the_map_cannot_say():
    state = reference("llama").state
    with pytest.raises(ConfigError, match="lm_head.weight differs from the token embedding"):
        hf.from_hf(state, reference("llama_tied").model)
    resolved = lambda **fields: resolve(Run(model=Model(**fields))).model
    with pytest.raises(ConfigError, match="model.kv_heads = 2: .* Legal: 4"):
        hf.to_hf({}, resolved(style="gpt2", kv_heads=2))
    with pytest.raises(ConfigError, match="model.qk_norm = True: .* Legal: False"):
        hf.from_hf(state, resolved(style="llama", qk_norm=True))


def test_hf_configs_become_models():
    common = dict(layers=3, heads=4, head_dim=6, dropout=0.0, window=None, qk_norm=False)
    llama = Model(style="llama", width=20, kv_heads=2, ffn=56, vocab=53, tied=False, rope_theta=50.0, norm_eps=1e-3, max_positions=40, **common)
    assert hf.model_of(CONFIGS["llama"]) == llama
    assert hf.model_of(CONFIGS["gpt2"]) == Model(style="gpt2", width=24, kv_heads=4, ffn=88, vocab=37, tied=True, norm_eps=1e-3,
                                                 max_positions=40, **common)
    assert hf.model_of(CONFIGS["gpt2_untied"]).ffn == 96 and not hf.model_of(CONFIGS["gpt2_untied"]).tied
    for config in CONFIGS.values():
        assert hf.model_of(config.to_dict()) == hf.model_of(config.to_diff_dict()) == hf.model_of(config)
    for empty in (transformers.GPT2Config(), transformers.LlamaConfig()):
        assert hf.model_of({"model_type": empty.model_type}) == hf.model_of(empty)
    old = {"model_type": "llama", **LLAMA, "rope_parameters": None, "rope_theta": 50.0, "rope_scaling": None}
    assert hf.model_of(old) == llama
    assert hf.model_of(transformers.GPT2Config(resid_pdrop=0.3)).dropout == 0


REFUSED = [
    ({"model_type": "mistral"}, ["model_type = 'mistral'", "Legal: gpt2, llama"]),
    ({}, ["model_type = None"]),
    (dict(model_type="gpt2", activation_function="relu", scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True,
          scale_attn_weights=False, add_cross_attention=True),
     ["activation_function = 'relu'", "Legal: 'gelu_new'", "scale_attn_by_inverse_layer_idx = True", "reorder_and_upcast_attn = True",
      "scale_attn_weights = False", "add_cross_attention = True"]),
    (dict(model_type="llama", hidden_act="gelu", attention_bias=True, mlp_bias=True, rope_scaling={"type": "linear", "factor": 2.0}),
     ["hidden_act = 'gelu'", "Legal: 'silu'", "attention_bias = True", "mlp_bias = True", "rope_scaling = {'type': 'linear', 'factor': 2.0}",
      "Legal rope_type: default"]),
    (transformers.LlamaConfig(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)), ["rope_parameters = ", "'dynamic'"]),
]


@pytest.mark.parametrize("config, parts", REFUSED, ids=["mistral", "no_type", "gpt2", "llama_dict", "llama_object"])
def test_hf_configs_that_are_refused(config, parts):
    with pytest.raises(ConfigError) as caught:
        hf.model_of(config)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_hf_map_needs_neither_torch_nor_jax():
    code = ("import sys, jaxpara.hf as hf; hf.model_of({'model_type': 'llama'}); "
            "assert not {'torch', 'transformers', 'jax'} & sys.modules.keys()")
    subprocess.run([sys.executable, "-c", code], check=True)
