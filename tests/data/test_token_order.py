"""The slots of a sharded sequence: by hand, as permutations, and what the orders are for."""
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxpara.data import inverse, order
from jaxpara.errors import ConfigError

BY_HAND = {
    (8, 2, 1, "contiguous"): [0, 1, 2, 3, 4, 5, 6, 7],
    (16, 2, 1, "zigzag"): [0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7, 8, 9, 10, 11],
    (16, 2, 2, "zigzag"): [0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7, 8, 9, 10, 11],
    (12, 3, 1, "zigzag"): [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7],
    (8, 2, 1, "striped"): [0, 2, 4, 6, 1, 3, 5, 7],
    (8, 2, 2, "striped"): [0, 2, 4, 6, 1, 3, 5, 7],
    (12, 4, 1, "striped"): [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11],
    (6, 1, 2, "zigzag"): [0, 1, 2, 3, 4, 5],
    (7, 1, 1, "zigzag"): [0, 1, 2, 3, 4, 5, 6],
    (6, 1, 2, "striped"): [0, 1, 2, 3, 4, 5],
}


@pytest.mark.parametrize("arguments", BY_HAND, ids=str)
def test_by_hand(arguments):
    assert order(*arguments).tolist() == BY_HAND[arguments]


@pytest.mark.parametrize("device, positions", [(0, [0, 1, 2, 3, 12, 13, 14, 15]), (1, [4, 5, 6, 7, 8, 9, 10, 11])])
def test_zigzag_over_two_devices(device, positions):
    assert order(16, 2, 1, "zigzag").reshape(2, 8)[device].tolist() == positions


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.sampled_from(["contiguous", "zigzag", "striped"]))
def test_a_permutation_whose_inverse_undoes_it(ring, inner, times, kind):
    seq = 2 * ring * inner * times
    slots = order(seq, ring, inner, kind)
    assert slots.shape == (seq,) and np.issubdtype(slots.dtype, np.integer)
    assert sorted(slots) == list(range(seq))
    tokens = np.random.default_rng(0).permutation(seq)
    assert (tokens[slots][inverse(slots)] == tokens).all()
    assert (slots[inverse(slots)] == np.arange(seq)).all()


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 6), st.integers(1, 3), st.integers(1, 4))
def test_zigzag_and_striped_balance_causal_attention(ring, inner, times):
    """Query-key pairs of each ring group: equal for zigzag, within a token a row for striped, far apart for contiguous."""
    seq = 2 * ring * inner * times
    pairs = {kind: (order(seq, ring, inner, kind).reshape(ring, -1) + 1).sum(1) for kind in ("contiguous", "zigzag", "striped")}
    assert len(set(pairs["zigzag"])) == 1
    assert np.ptp(pairs["striped"]) == seq // ring * (ring - 1)
    assert np.ptp(pairs["contiguous"]) == (seq // ring) ** 2 * (ring - 1)


@pytest.mark.parametrize("arguments, message", [
    ((30, 4, 1, "contiguous"), r"train\.seq = 30 must be a multiple of 4, for mesh\.sp = 4\."),
    ((20, 4, 1, "zigzag"), r"train\.seq = 20 must be a multiple of 8, for mesh\.sp = 4 and 2·4 chunks"),
    ((12, 2, 4, "zigzag"), r"must be a multiple of 8, for mesh\.sp = 8"),
    ((16, 2, 1, "zebra"), r"parallel\.sp_order = zebra is not known\. Legal: contiguous, zigzag, striped"),
])
def test_refusals(arguments, message):
    with pytest.raises(ConfigError, match=message):
        order(*arguments)
