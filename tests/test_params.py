"""The parameter table: published sizes, and what every entry must be."""
import pytest

import jaxpara
from jaxpara import Model, Run
from jaxpara.config import Mesh, resolve
from jaxpara.params import count, padded_vocab, parameters, unstack

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


def test_query_and_key_norms_are_one_scale_per_head_width():
    plain, normed = (model_of(layers=3, width=20, heads=8, head_dim=6, qk_norm=on) for on in (False, True))
    assert count(normed) - count(plain) == 3 * 2 * 6


@pytest.mark.parametrize("sizes", [dict(style="llama", qk_norm=True), dict(style="gpt2"), dict(style="gpt2", tied=False)], ids=str)
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
