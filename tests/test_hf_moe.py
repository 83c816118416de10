"""The outside reference for experts: random HuggingFace Mixtral and Qwen3-MoE against jaxpara, for the same weights through `jaxpara.hf`."""
import copy
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest

from jaxpara import hf
from jaxpara.config import Model, MoE, Run, resolve
from jaxpara.errors import ConfigError
from jaxpara.params import count, count_active, layers_of, parameters

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from safetensors.numpy import load_file     # noqa: E402 (only where transformers is)
from test_hf import TOKENS, WideTorch, batch_of, build_hf, case, compiled, planted      # noqa: E402
from transformers.models.mixtral import modeling_mixtral      # noqa: E402
from transformers.models.qwen3_moe import modeling_qwen3_moe      # noqa: E402

COMMON = dict(vocab_size=53, hidden_size=24, num_attention_heads=6, num_key_value_heads=2, head_dim=10, num_experts_per_tok=2,
              max_position_embeddings=40, rms_norm_eps=1e-3, rope_parameters=dict(rope_type="default", rope_theta=50.0), **TOKENS)
QWEN3 = dict(intermediate_size=50, moe_intermediate_size=28, **COMMON)
CONFIGS = {      # no two dims of a weight are equal; the last has experts in its layers 3 and 5
    "mixtral": transformers.MixtralConfig(num_hidden_layers=3, intermediate_size=28, num_local_experts=8, sliding_window=7, **COMMON),
    "qwen3_moe": transformers.Qwen3MoeConfig(num_hidden_layers=2, num_experts=8, norm_topk_prob=True, tie_word_embeddings=True, **QWEN3),
    "qwen3_mixed": transformers.Qwen3MoeConfig(num_hidden_layers=6, num_experts=4, decoder_sparse_step=2, norm_topk_prob=False,
                                               mlp_only_layers=[0, 1], **QWEN3),
}
MODULES = {"mixtral": modeling_mixtral, "qwen3_moe": modeling_qwen3_moe}
MESHES = {"one_device": {}, "ep4_tp2": {"mesh.ep": 4, "mesh.tp": 2}}


@lru_cache
def reference(name, wide=False, **changes):
    """What HuggingFace gives, with some fields of the configuration changed: state (arrays by name), logits, loss, gradients under jaxpara's
    names. wide: in float64 throughout, the router's softmax too."""
    config, model = copy.deepcopy(CONFIGS[name]), hf.model_of(CONFIGS[name])
    for field, value in changes.items():
        setattr(config, field, value)
    batch = {key: torch.from_numpy(value).long() for key, value in batch_of(config.vocab_size).items()}
    with pytest.MonkeyPatch.context() as patch:
        if wide:
            patch.setattr(MODULES[config.model_type], "torch", WideTorch())
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)       # Mixtral's router
        module = build_hf(config)
        module.config._experts_implementation = "eager"     # its grouped matmul takes no float64
        logits = module(batch["tokens"], use_cache=False).logits
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=-1, reduction="sum")
        loss = total / (batch["targets"] != -1).sum()
        loss.backward()
    return SimpleNamespace(config=config, model=model, size=module.num_parameters(), logits=logits.detach().numpy(), loss=loss.item(),
                           state={key: value.numpy().copy() for key, value in module.state_dict().items()},
                           grads=hf.from_hf({key: value.grad for key, value in module.named_parameters()}, model))


@pytest.fixture(scope="module")
def ours(request):
    """One program of jaxpara, compiled once for all tests of a case (name, mesh, dtype), with HuggingFace's weights in it."""
    name, mesh, dtype = request.param
    return compiled(name, hf.model_of(CONFIGS[name]), MESHES[mesh], dtype, reference(name).state)


WIDE = [case(name, mesh) for name in CONFIGS for mesh in MESHES]
CASES = [*WIDE, case("mixtral", "ep4_tp2", "float32")]
ALONE = [case(name) for name in CONFIGS]


def leaves(grads):
    """{name: gradient}, those of experts one by one."""
    each = lambda path, leaf: {f"{path}[{expert}]": part for expert, part in enumerate(leaf)} if leaf.ndim == 3 and ".moe." in path else {path: leaf}
    return {name: part for path, leaf in grads.items() for name, part in each(path, leaf).items()}


def errors(got, want):
    """(logits, loss, worst gradient leaf): the first two absolute, a leaf relative to its largest value or 1e-3 of the largest of all."""
    ours, theirs = leaves(got.grads), leaves(want.grads)
    assert ours.keys() == theirs.keys()
    floor = 1e-3 * max(np.abs(leaf).max() for leaf in theirs.values())
    worst = max(np.abs(ours[name] - leaf).max() / max(np.abs(leaf).max(), floor) for name, leaf in theirs.items())
    return np.abs(got.logits - want.logits).max(), abs(got.loss - want.loss), worst


@pytest.mark.parametrize("ours", CASES, indirect=True)
def test_moe_hf_as_it_is(ours, record_property):
    logits, loss, grads = errors(ours.real, reference(ours.name))
    record_property("errors", f"logits {logits:.1e}, loss {loss:.1e}, gradients {grads:.1e}")
    assert logits < 1e-5 and loss < 1e-5 and grads < 1e-4, (logits, loss, grads)
    assert ours.real.logits.dtype == ours.dtype and {leaf.dtype for leaf in ours.real.grads.values()} == {np.dtype(ours.dtype)}


@pytest.mark.parametrize("ours", WIDE, indirect=True)
def test_moe_hf_in_float64_throughout(ours, record_property):
    logits, loss, grads = errors(ours.real, reference(ours.name, wide=True))
    record_property("errors", f"logits {logits:.1e}, loss {loss:.1e}, gradients {grads:.1e}")
    assert logits < 1e-12 and loss < 1e-12 and grads < 1e-11, (logits, loss, grads)


@pytest.mark.parametrize("name", CONFIGS)
def test_moe_hf_reference_has_something_to_show(name):
    """Logits of ordinary size, and gradients that are there for the router and each expert of each layer, none compared with the floor."""
    want = reference(name)
    found, moe = leaves(want.grads), want.model.moe
    assert 1 < np.abs(want.logits).max() < 20
    for layer in layers_of(want.model, "moe"):
        names = [f"layers.{layer}.moe.router"]
        names += [f"layers.{layer}.moe.{part}[{expert}]" for part in ("gate", "up", "down") for expert in range(moe.experts)]
        assert set(names) <= found.keys()
    floor = 1e-3 * max(np.abs(leaf).max() for leaf in found.values())
    assert min(np.abs(leaf).max() for leaf in found.values()) > floor


FAULTS = {      # HuggingFace names, what is read from them instead of the right thing, dims (see `planted`)
    "mixtral": [("mlp.experts.gate_up_proj", "layers.moe.up layers.moe.gate", "ehf -> e f+ h")],
    "qwen3_moe": [("mlp.experts.gate_up_proj", "layers.moe.up layers.moe.gate", "ehf -> e f+ h"),
                  ("self_attn.q_norm.weight self_attn.k_norm.weight", "layers.attention.key_scale layers.attention.query_scale", "d -> d")],
}
OTHERS = {      # what another HuggingFace model computes with the same weights
    "mixtral": [dict(sliding_window=None), dict(num_experts_per_tok=3)],
    "qwen3_moe": [dict(norm_topk_prob=False)],
    "qwen3_mixed": [dict(norm_topk_prob=True)],
}


@pytest.mark.parametrize("ours", ALONE, indirect=True)
def test_moe_hf_planted_faults_show(ours, monkeypatch):
    """Weights read through a wrong map, their experts in another order, or another model's results: logits, loss and gradients all differ."""
    want, right = reference(ours.name), hf.from_hf(reference(ours.name).state, ours.model)
    seen = {}
    for fault in FAULTS.get(ours.name, []):
        with monkeypatch.context() as patch:
            patch.setitem(hf.WEIGHTS, ours.name, planted(ours.name, fault))
            wrong = hf.from_hf(want.state, ours.model)
            grads = hf.from_hf(hf.to_hf(want.grads, ours.model), ours.model)
        seen[str(fault)] = errors(ours.result(wrong), SimpleNamespace(logits=want.logits, loss=want.loss, grads=grads))
    turned = {path: leaf[::-1] if leaf.ndim == 3 and ".moe." in path else leaf for path, leaf in right.items()}
    seen["experts the other way round"] = errors(ours.result(turned), want)
    for changes in OTHERS[ours.name]:
        seen[str(changes)] = errors(ours.real, reference(ours.name, **changes))
    assert len(seen) >= 2
    assert all(logits > 1e-2 and loss > 1e-4 and grads > 1e-2 for logits, loss, grads in seen.values()), seen


@pytest.mark.parametrize("name", CONFIGS)
def test_moe_hf_round_trip_is_bitwise(name, tmp_path):
    """There and back gives the state dict, names and bits; HuggingFace takes the result; what it saves, expert by expert, reads the same."""
    module = build_hf(CONFIGS[name])
    model, state = hf.model_of(module.config), module.state_dict()
    params = hf.from_hf(state, model)
    again = hf.to_hf(params, model)
    assert {path: leaf.shape for path, leaf in params.items()} == shapes(model)
    assert again.keys() == state.keys()
    assert all(value.dtype == np.float64 and np.array_equal(value, state[key].numpy()) for key, value in again.items())
    other = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).double()
    other.load_state_dict({key: torch.from_numpy(value) for key, value in again.items()})
    assert all(torch.equal(value, state[key]) for key, value in other.state_dict().items())
    module.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert sum(bool(hf.EXPERT.search(key)) for key in saved) == 3 * model.moe.experts * len(layers_of(model, "moe"))
    for given in (saved, {key.removeprefix("model."): value for key, value in saved.items()}):
        read = hf.from_hf(given, model)
        assert read.keys() == params.keys() and all(np.array_equal(read[path], params[path]) for path in params)


def shapes(model):
    """{dotted path: shape} of every parameter, one layer each."""
    named = {}
    for p in parameters(model):
        layers = p.of if p.stacked else [None]
        named |= {p.name.replace("layers.", f"layers.{layer}.", 1) if p.stacked else p.name: p.shape[p.stacked:] for layer in layers}
    return named


@pytest.mark.parametrize("ours", [case("mixtral", "ep4_tp2"), case("qwen3_mixed", "ep4_tp2")], indirect=True)
def test_moe_hf_weights_come_back_from_a_program(ours):
    again, state = hf.to_hf(ours.real.params, ours.model), reference(ours.name).state
    assert again.keys() == state.keys() and all(np.array_equal(again[key], state[key]) for key in state)


def test_moe_hf_counts_agree():
    for name in CONFIGS:
        assert count(reference(name).model) == reference(name).size
    real = [(transformers.MixtralConfig(), (46_702_792_704, 12_879_925_248)),       # Mixtral 8x7B, Qwen3-30B-A3B
            (transformers.Qwen3MoeConfig(num_hidden_layers=48, head_dim=128), (30_532_122_624, 3_353_032_704))]
    for config, sizes in real:
        with torch.device("meta"):
            assert transformers.AutoModelForCausalLM.from_config(config).num_parameters() == sizes[0]
        assert (count(hf.model_of(config)), count_active(hf.model_of(config))) == sizes


def test_moe_hf_configs_become_models():
    common = dict(style="llama", width=24, heads=6, kv_heads=2, head_dim=10, vocab=53, rope_theta=50.0, norm_eps=1e-3, max_positions=40)
    assert hf.model_of(CONFIGS["mixtral"]) == Model(layers=3, ffn=28, tied=False, window=7, moe=MoE(experts=8, top_k=2, ffn=28), **common)
    assert hf.model_of(CONFIGS["qwen3_moe"]) == Model(layers=2, ffn=50, tied=True, qk_norm=True, moe=MoE(experts=8, top_k=2, ffn=28), **common)
    assert hf.model_of(CONFIGS["qwen3_mixed"]) == Model(layers=6, ffn=50, tied=False, qk_norm=True, **common,
                                                        moe=MoE(experts=4, top_k=2, ffn=28, every=2, first_dense=2, renormalise=False))
    for config in CONFIGS.values():
        assert hf.model_of(config.to_dict()) == hf.model_of(config.to_diff_dict()) == hf.model_of(config)
    for empty in (transformers.MixtralConfig(), transformers.Qwen3MoeConfig()):
        assert hf.model_of({"model_type": empty.model_type}) == hf.model_of(empty)
    hub = {"model_type": "qwen3_moe", "num_experts": 64, "rope_theta": 5e6, "rope_scaling": None, "sliding_window": None, "max_window_layers": 48}
    assert (hf.model_of(hub).moe.experts, hf.model_of(hub).rope_theta, hf.model_of(hub).window) == (64, 5e6, None)
    assert hf.model_of(hub | {"use_sliding_window": True, "sliding_window": 9}).window == 9
    trained = transformers.MixtralConfig(output_router_logits=True, router_aux_loss_coef=0.5, router_jitter_noise=0.1, attention_dropout=0.1)
    assert hf.model_of(trained) == hf.model_of(transformers.MixtralConfig())


@pytest.mark.parametrize("dense, step, legal", [([], 3, True), ([0, 1], 1, True), ([0, 1, 2], 2, True), ([1, 0], 3, True), ([1], 2, True),
                                                ([4], 1, False), ([0, 3], 2, False)])
def test_moe_hf_dense_layers(dense, step, legal):
    """The layers with experts are those that HuggingFace builds, or the configuration is refused."""
    config = transformers.Qwen3MoeConfig(num_hidden_layers=7, num_experts=4, decoder_sparse_step=step, mlp_only_layers=dense, **QWEN3)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))
    if legal:
        found = layers_of(hf.model_of(config), "moe")
        assert found == tuple(at for at, layer in enumerate(module.model.layers) if hasattr(layer.mlp, "experts")) and found
    else:
        with pytest.raises(ConfigError) as caught:
            hf.model_of(config)
        assert f"mlp_only_layers = {dense} with decoder_sparse_step = {step}: " in str(caught.value) and "Legal: [], [0]" in str(caught.value)


@pytest.mark.parametrize("config, parts", [
    (dict(model_type="mixtral", hidden_act="gelu", rope_scaling={"type": "linear", "factor": 2.0}), ["hidden_act = 'gelu'", "rope_type: default"]),
    (dict(model_type="mixtral", num_local_experts=0), ["hf_config.num_local_experts = 0", "Legal: 1 or more"]),
    (dict(model_type="qwen3_moe", attention_bias=True, num_experts=0), ["attention_bias = True", "hf_config.num_experts = 0"]),
    (dict(model_type="qwen3"), ["model_type = 'qwen3'", "Legal: gpt2, llama, mixtral, qwen3_moe."]),
], ids=["mixtral", "mixtral_dense", "qwen3_moe", "qwen3"])
def test_moe_hf_configs_that_are_refused(config, parts):
    with pytest.raises(ConfigError) as caught:
        hf.model_of(config)
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize("fields, moe, parts", [
    ({}, dict(score="sigmoid", shared=1, bias_rate=0.1, noise=True, scale=2.0, routing="expert_choice", expert_groups=2, eval_capacity=True),
     ["model.moe.score = 'sigmoid': HuggingFace's mixtral has no such variant. Legal: 'softmax'.", "moe.shared = 1", "moe.bias_rate = 0.1",
      "moe.noise = True", "moe.scale = 2.0", "moe.routing = 'expert_choice'", "moe.expert_groups = 2", "moe.eval_capacity = True"]),
    ({}, dict(renormalise=False, every=2), ["model.moe.renormalise = False: HuggingFace's mixtral", "every = 2, first_dense = 0"]),
    (dict(qk_norm=True), dict(score="sigmoid", renormalise=False, first_dense=1), ["model.moe.score = 'sigmoid': HuggingFace's qwen3_moe"]),
    (dict(style="gpt2"), {}, ["model.style = 'gpt2' with model.moe.experts = 4: HuggingFace has no such model. Legal: 'llama'."]),
], ids=["both", "mixtral", "qwen3_moe", "gpt2"])
def test_moe_hf_models_that_neither_family_has(fields, moe, parts):
    model = resolve(Run(model=Model(moe=MoE(experts=4, **moe), **fields))).model
    for there in (hf.to_hf, hf.from_hf):
        with pytest.raises(ConfigError) as caught:
            there({}, model)
        assert all(part in str(caught.value) for part in parts), caught.value
    assert len(caught.value.violations) == max(len(parts), len(moe) if fields.get("qk_norm") is None else 1)


def test_moe_hf_choices_of_training_are_free():
    """Dropped tokens, jitter and auxiliary losses change training, not the model: the names are the same."""
    want = reference("mixtral")
    model = replace(want.model, moe=replace(want.model.moe, capacity=1.25, jitter=0.1, dropout=0.1, aux_weight=0.01, z_weight=0.001))
    assert hf.to_hf(hf.from_hf(want.state, model), model).keys() == want.state.keys()


def test_moe_hf_names_that_are_wrong_are_all_listed(tmp_path):
    want = reference("qwen3_mixed")
    state = dict(want.state)
    moved = state.pop("model.layers.3.mlp.experts.down_proj")
    state["model.layers.0.mlp.experts.down_proj"] = moved
    with pytest.raises(ConfigError) as caught:
        hf.from_hf(state, want.model)
    assert caught.value.violations == ("Missing weights (1): model.layers.3.mlp.experts.down_proj (4, 24, 28).",
                                       "Extra weights, for which the model has no place (1): model.layers.0.mlp.experts.down_proj.")
    build_hf(CONFIGS["mixtral"]).save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    saved["model.layers.1.block_sparse_moe.experts.8.w3.weight"] = saved.pop("model.layers.1.block_sparse_moe.experts.7.w3.weight")
    saved["model.layers.2.block_sparse_moe.experts.0.w2.weight"] = saved["model.layers.2.block_sparse_moe.experts.0.w2.weight"].T
    with pytest.raises(ConfigError) as caught:
        hf.from_hf(saved, reference("mixtral").model)
    assert caught.value.violations == (
        "Missing weights (1): model.layers.1.block_sparse_moe.experts.7.w3.weight (28, 24).",
        "Extra weights, for which the model has no place (1): model.layers.1.block_sparse_moe.experts.8.w3.weight.",
        "Wrong shapes of weights (1): model.layers.2.block_sparse_moe.experts.0.w2.weight (28, 24), not (24, 28).")


def test_moe_hf_map_needs_neither_torch_nor_jax():
    code = ("import sys, jaxpara.hf as hf; model = hf.model_of({'model_type': 'mixtral'}); hf._rows(model, True); "
            "assert not {'torch', 'transformers', 'jax'} & sys.modules.keys()")
    subprocess.run([sys.executable, "-c", code], check=True)
