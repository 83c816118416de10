"""Layers per chunk: even, chosen from costs, given; and what cannot be."""
from itertools import accumulate, combinations

import pytest
from hypothesis import given, settings, strategies as st

from jaxpara.errors import ConfigError
from jaxpara.pipeline import split_layers
from jaxpara.pipeline.schedule import vee


def counts(split):
    return [len(layers) for layers in split.values()]


def slowest(sizes, placement, costs, ends):
    edges, work = [0, *accumulate(sizes)], [0.0] * (max(placement) + 1)
    for chunk, stage in enumerate(placement):
        work[stage] += sum(costs[edges[chunk]:edges[chunk + 1]])
    work[placement[0]] += ends[0]
    work[placement[-1]] += ends[1]
    return max(work)


def every(layers, parts):
    for cuts in combinations(range(1, layers), parts - 1):
        yield [b - a for a, b in zip((0, *cuts), (*cuts, layers))]


def test_even():
    """Public case: 24 layers, 4 stages, 2 chunks: stage 0 owns 0-2 and 12-14."""
    split = split_layers(24, 4, 2)
    assert list(split[0, 0]) == [0, 1, 2] and list(split[0, 4]) == [12, 13, 14]
    assert list(split) == [(0, 0), (1, 1), (2, 2), (3, 3), (0, 4), (1, 5), (2, 6), (3, 7)]
    assert [layer for layers in split.values() for layer in layers] == list(range(24))
    in_a_v = split_layers(8, 2, 2, placement=vee(2))
    assert [list(in_a_v[0, chunk]) for chunk in (0, 3)] == [[0, 1], [6, 7]]


def test_uneven():
    assert counts(split_layers(10, 4)) == [2, 3, 3, 2]                   # the rest lies in the middle
    assert counts(split_layers(10, 4, ends=(.5, 2))) == [3, 3, 3, 1]     # the head is worth two layers
    assert counts(split_layers(8, 4, ends=(0, 1))) == [2, 2, 3, 1]
    assert counts(split_layers(5, 2, costs=[5, 1, 1, 1, 1])) == [1, 4]


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 4), st.integers(1, 2), st.integers(0, 5), st.tuples(st.integers(0, 3), st.integers(0, 3)), st.booleans())
def test_equal_layers_are_split_as_well_as_can_be(p, v, more, ends, in_v):
    layers = p * v + more
    placement = vee(p) if in_v and v == 2 else tuple(range(p)) * v
    split = split_layers(layers, p, v, placement=placement, ends=ends)
    assert [layer for part in split.values() for layer in part] == list(range(layers)) and min(counts(split)) > 0
    best = min(slowest(sizes, placement, [1] * layers, ends) for sizes in every(layers, p * v))
    assert slowest(counts(split), placement, [1] * layers, ends) == best


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(0, 9), min_size=4, max_size=9), st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_unequal_layers_are_split_as_well_as_can_be(p, costs, ends):
    split = split_layers(len(costs), p, costs=costs, ends=ends)
    assert [layer for part in split.values() for layer in part] == list(range(len(costs))) and min(counts(split)) > 0
    worth = [end * sum(costs) / len(costs) for end in ends]
    best = min(slowest(sizes, range(p), costs, worth) for sizes in every(len(costs), p))
    if len(set(costs)) > 1:
        assert slowest(counts(split), range(p), costs, worth) == pytest.approx(best)


def test_given():
    assert counts(split_layers(10, 4, given=(1, 4, 3, 2))) == [1, 4, 3, 2]
    assert counts(split_layers(10, 2, 2, given=(7, 3))) == [4, 2, 3, 1]
    assert counts(split_layers(10, 2, 2, given=(7, 3), placement=vee(2))) == [4, 2, 1, 3]
    assert counts(split_layers(10, 2, 2, given=(1, 2, 3, 4))) == [1, 2, 3, 4]


NAMES = ("model.layers", "mesh.pp", "parallel.chunks", "parallel.layers_per_stage")


@pytest.mark.parametrize("arguments, options, words", [
    ((6, 4, 2), {}, ["model.layers = 6 are fewer than mesh.pp · parallel.chunks = 4 · 2 = 8 chunks", "model.layers 8 or more", "4 · 1, 3 · 2"]),
    ((10, 4), {"given": (3, 3, 3, 3)}, ["parallel.layers_per_stage = 3,3,3,3 must add up to model.layers = 10 (adds up to 12)", "Such as: 3,3,2,2"]),
    ((10, 4), {"given": (5, 5, 0, 0)}, ["at least 1 each"]),
    ((10, 2, 2), {"given": (9, 1)}, ["at least 2 each"]),
    ((10, 4), {"given": (5, 5)}, ["has 2 numbers for mesh.pp = 4. Legal: 4."]),
    ((10, 2, 2), {"given": (5, 3, 2)}, ["Legal: 2 (one per stage) or 4 (one per chunk, in model order)."]),
    ((10, 0), {}, ["mesh.pp = 0 must be greater than 0"]),
    ((10, 4), {"costs": [1] * 9}, ["costs has 9 numbers for model.layers = 10"]),
])
def test_impossible(arguments, options, words):
    with pytest.raises(ConfigError) as error:
        split_layers(*arguments, **options, names=NAMES)
    assert all(part in str(error.value) for part in words), str(error.value)
