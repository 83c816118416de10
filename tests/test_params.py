"""The parameter table: published sizes, and what every entry must be."""
import pytest

import jaxpara
from jaxpara import Model, Run
from jaxpara.config import Mesh, MoE, resolve
from jaxpara.params import count, count_active, kinds, padded_vocab, parameters, segments, unstack

LLAMA2 = dict(style="llama", vocab=32000, tied=False)
LLAMA3 = dict(style="llama", vocab=128256, kv_heads=8, tied=False)
SIZES = {
    "GPT-2 small": (dict(style="gpt2", layers=12, width=768, heads=12, vocab=50257, max_positions=1024), 124_439_808),
    "GPT-2 XL": (dict(style="gpt2", layers=48, width=1600, heads=25, vocab=50257, max_positions=1024), 1_557_611_200),
    "Llama-2 7B": (dict(LLAMA2, layers=32, width=4096, heads=32, ffn=11008), 6_738_415_616),
    "Llama-2 13B": (dict(LLAMA2, layers=40, width=5120, heads=40, ffn=13824), 13_015_864_320),
    "Llama-2 70B": (dict(LLAMA2, layers=80, width=8192, heads=64, kv_heads=8, ffn=28672), 68_976_648_192),
    "Llama-3 8B": (dict(LLAMA3, layers=32, width=4096, heads=32, ffn=14336), 8_030_261_248),
    "Llama-3 70B": (dict(LLAMA3, layers=80, width=8192, heads=64, ffn=28672), 70_553_706_496),
    "Llama-3 405B": (dict(LLAMA3, layers=126, width=16384, heads=128, ffn=53248), 405_853_388_800),
}


def model_of(**sizes):
    return resolve(Run(model=Model(**sizes))).model


@pytest.mark.parametrize("name", SIZES)
def test_published_parameter_counts(name):
    sizes, wanted = SIZES[name]
    assert count(model_of(**sizes)) == wanted


@pytest.mark.parametrize("recipe, name", [("gpt2_124m", "GPT-2 small"), ("llama3_8b", "Llama-3 8B"), ("llama3_70b", "Llama-3 70B")])
def test_recipes_have_the_published_counts(recipe, name):
    assert count(jaxpara.load(recipe).model) == SIZES[name][1]


def test_closed_forms_of_the_specification():
    """Dims all different, attention's width N_q·d not the model's."""
    llama = model_of(style="llama", layers=3, width=20, heads=8, kv_heads=2, head_dim=6, ffn=40, vocab=34)
    layer = 2 * 20 * 8 * 6 + 2 * 20 * 2 * 6 + 3 * 20 * 40 + 2 * 20
    assert count(llama) == 3 * layer + 2 * 34 * 20 + 20
    tied = model_of(style="llama", layers=3, width=20, heads=8, kv_heads=2, head_dim=6, ffn=40, vocab=34, tied=True)
    assert count(llama) - count(tied) == 34 * 20
    layers, width, vocab, positions = 5, 24, 34, 7
    gpt2 = model_of(style="gpt2", layers=layers, width=width, heads=4, vocab=vocab, max_positions=positions)
    assert count(gpt2) == 12 * layers * width**2 + 13 * layers * width + (vocab + positions) * width + 2 * width


MIXTRAL = dict(style="llama", layers=32, width=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000, tied=False)


def test_mixtral_8x7b():
    """Published: 46.7 B parameters, of which a token meets 12.9 B."""
    model = model_of(**MIXTRAL, moe=MoE(experts=8, top_k=2))
    assert (count(model), count_active(model)) == (46_702_792_704, 12_879_925_248)


MIXED = dict(style="llama", layers=5, width=20, heads=4, kv_heads=2, head_dim=6, ffn=44, vocab=34)


@pytest.mark.parametrize("style, matrices", [("llama", 3), ("gpt2", 2)])
def test_experts(style, matrices):
    """E experts of their own width without biases, a router, the noise's twin of it, shared experts as one wide MLP."""
    sizes = {**MIXED, "style": style, "max_positions": 7}
    attention = count(model_of(**sizes)) - 5 * (matrices * 20 * 44 + (44 + 20) * (style == "gpt2"))
    model = model_of(**sizes, moe=MoE(experts=8, top_k=3, ffn=12))
    assert count(model) == attention + 5 * (8 * matrices * 20 * 12 + 20 * 8)
    assert count(model) - count_active(model) == 5 * (8 - 3) * matrices * 20 * 12
    more = model_of(**sizes, moe=MoE(experts=8, top_k=3, ffn=12, noise=True, shared=2))
    assert count(more) - count(model) == count_active(more) - count_active(model) == 5 * (20 * 8 + 2 * matrices * 20 * 12)
    assert not any("bias" in entry.name for entry in parameters(more) if "moe" in entry.name)


@pytest.mark.parametrize("every, first, wanted, parts", [
    (1, 0, "mmmmm", [("m", 5)]), (2, 0, "dmdmd", [("dm", 2), ("d", 1)]), (1, 1, "dmmmm", [("d", 1), ("m", 4)]),
    (2, 1, "ddmdm", [("d", 1), ("dm", 2)]), (3, 0, "ddmdd", [("ddm", 1), ("d", 2)]), (1, 3, "dddmm", [("d", 3), ("m", 2)])])
def test_dense_layers_between(every, first, wanted, parts):
    """`every` and `first_dense`: the kinds, the loops that run them, and the parameters that exist."""
    model = model_of(**MIXED, moe=MoE(experts=8, top_k=3, ffn=12, every=every, first_dense=first))
    word = {"m": "moe", "d": "dense"}
    assert kinds(model) == tuple(word[letter] for letter in wanted)
    assert segments(model, 5) == [(tuple(word[letter] for letter in period), times) for period, times in parts]
    routed = wanted.count("m")
    dense = model_of(**MIXED)
    assert count(model) == count(dense) + routed * (8 * 3 * 20 * 12 + 20 * 8 - 3 * 20 * 44)
    of = {entry.name: entry.of for entry in parameters(model)}
    assert of["layers.moe.router"] == tuple(layer for layer in range(5) if wanted[layer] == "m")
    assert of.get("layers.mlp.up", ()) == tuple(layer for layer in range(5) if wanted[layer] == "d") and of["layers.norm1.scale"] == tuple(range(5))


def test_query_and_key_norms_are_one_scale_per_head_width():
    plain, normed = (model_of(layers=3, width=20, heads=8, head_dim=6, qk_norm=on) for on in (False, True))
    assert count(normed) - count(plain) == 3 * 2 * 6


@pytest.mark.parametrize("sizes", [dict(style="llama", qk_norm=True), dict(style="gpt2"), dict(style="gpt2", tied=False),
                                   dict(style="llama", moe=MoE(experts=4, shared=1, noise=True))], ids=str)
def test_every_entry_is_whole(sizes):
    table = parameters(model_of(**sizes))
    assert len({entry.name for entry in table}) == len(table)
    for entry in table:
        assert len(entry.shape) == len(entry.labels) == len(set(entry.labels)), entry
        assert entry.stacked == entry.name.startswith("layers.") and (not entry.stacked or entry.shape[0] == 4)
        assert (entry.init == "normal") == (entry.std > 0) == entry.matrix, entry
        assert entry.init == {"scale": "ones", "bias": "zeros"}.get(entry.name.split(".")[-1].split("_")[-1], "normal"), entry


def test_exits_are_drawn_smaller_by_the_root_of_their_number():
    table = {entry.name: entry.std for entry in parameters(model_of(style="gpt2", layers=8))}
    for name in ("layers.attention.output", "layers.mlp.down"):
        assert table[name] == pytest.approx(0.02 / 4)
    assert table["layers.attention.query"] == table["embedding.tokens"] == 0.02


def test_names_of_single_layers():
    assert unstack("layers.attention.query", 3) == "layers.3.attention.query"


@pytest.mark.parametrize("vocab, tp, rows", [(50257, 8, 50264), (256, 4, 256), (17, 8, 24), (17, 1, 17), (3, 8, 8)])
def test_the_vocabulary_is_stored_in_whole_rows_per_device(vocab, tp, rows):
    assert padded_vocab(model_of(vocab=vocab), Mesh(tp=tp)) == rows
