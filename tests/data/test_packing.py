"""Stream against a slow twin that walks the tokens one by one, and the twin against planted faults."""
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxpara.data.packing import Stream
from jaxpara.errors import ConfigError

SEPARATOR = 0


def numbered(lengths, dtype=np.uint16):
    """Documents of the given lengths in which no token occurs twice."""
    ends = np.cumsum([1, *lengths])
    return [np.arange(first, last, dtype=dtype) for first, last in zip(ends, ends[1:])]


def slow_epoch(documents, seq, seed, epoch):
    """Rows of one epoch as the definition says it: a list of lists of (token, target, segment, position)."""
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    order = generator.permutation(len(documents))
    text = [(int(token), place) for place, index in enumerate(order) for token in [*documents[index], SEPARATOR]]
    rows = []
    for start in range(0, len(text) - seq + 1, seq):
        row = []
        for at in range(start, start + seq):
            token, segment = text[at]
            target = text[at + 1][0] if at + 1 < len(text) and text[at + 1][1] == segment else -1
            same_as_before = at > start and text[at - 1][1] == segment
            row.append((token, target, segment, row[-1][3] + 1 if same_as_before else 0))
        rows.append(row)
    return [rows[n] for n in generator.permutation(len(rows))]


def check_against_slow(kind, documents, seq, seed, start, count):
    got = kind(documents, seq, seed, SEPARATOR).rows(start, count)
    rows, epoch = [], 0
    while len(rows) < start + count:
        rows += slow_epoch(documents, seq, seed, epoch)
        epoch += 1
    want = np.array(rows[start:start + count], np.int32).reshape(count, seq, 4)
    for n, name in enumerate(("tokens", "targets", "segments", "positions")):
        assert got[name].dtype == np.int32 and got[name].shape == (count, seq)
        np.testing.assert_array_equal(got[name], want[..., n], err_msg=name)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=7), st.integers(1, 9), st.integers(0, 2 ** 32 - 1), st.data())
def test_rows_equal_the_slow_twin(lengths, seq, seed, data):
    seq = min(seq, sum(lengths) + len(lengths))
    start, count = data.draw(st.integers(0, 30)), data.draw(st.integers(0, 15))
    check_against_slow(Stream, numbered(lengths), seq, seed, start, count)


class AcrossDocuments(Stream):
    """Learns to predict the first token of the next document."""
    def rows(self, start, count):
        rows = super().rows(start, count)
        shifted = np.append(rows["tokens"].ravel()[1:], -1).reshape(rows["tokens"].shape)
        return rows | {"targets": np.where(rows["targets"] < 0, shifted, rows["targets"])}


class NoTargetAtRowEnd(Stream):
    def rows(self, start, count):
        rows = super().rows(start, count)
        rows["targets"][:, -1] = -1
        return rows


class Unshifted(Stream):
    def rows(self, start, count):
        rows = super().rows(start, count)
        return rows | {"targets": np.where(rows["targets"] < 0, -1, rows["tokens"])}


class PositionsInRow(Stream):
    """Positions that do not restart with a document."""
    def rows(self, start, count):
        rows = super().rows(start, count)
        return rows | {"positions": np.broadcast_to(np.arange(self.seq, dtype=np.int32), (count, self.seq))}


class OneSegment(Stream):
    def rows(self, start, count):
        rows = super().rows(start, count)
        return rows | {"segments": np.zeros_like(rows["segments"])}


class SameEpochAgain(Stream):
    def _epoch(self, epoch):
        return super()._epoch(0)


class StaleEpoch(Stream):
    """Keeps the first epoch it met."""
    def _epoch(self, epoch):
        return self._last[1:] if self._last else super()._epoch(epoch)


class SeedIgnored(Stream):
    def __init__(self, documents, seq, seed, separator):
        super().__init__(documents, seq, 0, separator)


@pytest.mark.parametrize("fault", [AcrossDocuments, NoTargetAtRowEnd, Unshifted, PositionsInRow, OneSegment, SameEpochAgain, StaleEpoch, SeedIgnored])
def test_the_slow_twin_sees_planted_faults(fault):
    sample = numbered([3, 9, 1, 6, 4, 2]), 4, 5, 0, 20
    check_against_slow(Stream, *sample)
    with pytest.raises(AssertionError):
        check_against_slow(fault, *sample)


def test_one_document_by_hand():
    rows = Stream([np.array([7, 8, 9, 5, 6], np.uint8)], 3, 0, SEPARATOR).rows(0, 2)
    assert rows["tokens"].tolist() == [[7, 8, 9], [5, 6, 0]]
    assert rows["targets"].tolist() == [[8, 9, 5], [6, 0, -1]]
    assert rows["positions"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert rows["segments"].tolist() == [[0, 0, 0], [0, 0, 0]]


def test_target_at_an_epochs_end_is_the_dropped_tail():
    rows = Stream([np.array([7, 8, 9, 5], np.uint8)], 2, 0, SEPARATOR).rows(0, 4)
    assert rows["tokens"].tolist() == [[7, 8], [9, 5]] * 2
    assert rows["targets"].tolist() == [[8, 9], [5, 0]] * 2


def test_every_token_once_an_epoch():
    lengths, seq = [30, 1, 17, 5, 0, 44, 8], 8
    stream = Stream(numbered(lengths), seq, 3, SEPARATOR)
    assert stream.tokens == sum(lengths) + len(lengths)
    assert stream.epoch_rows == stream.tokens // seq
    for epoch in range(4):
        tokens = stream.rows(epoch * stream.epoch_rows, stream.epoch_rows)["tokens"].ravel()
        text = tokens[tokens != SEPARATOR]
        assert len(np.unique(text)) == len(text)
        assert set(text.tolist()) <= set(range(1, sum(lengths) + 1))
        assert len(tokens) > stream.tokens - seq


def test_epochs_and_seeds_differ_in_order():
    read = lambda seed, epoch: Stream(numbered([5] * 12), 6, seed, SEPARATOR).rows(epoch * 12, 12)["tokens"]
    first = read(0, 0)
    for other in (read(0, 1), read(0, 2), read(1, 0)):
        assert (other != first).any()
        assert sorted(other.ravel()) == sorted(first.ravel())
    assert (read(0, 1) != read(1, 0)).any()


def test_order_is_pinned():
    """A saved run resumes on the same text: these numbers may change only with a note to users."""
    stream = Stream(numbered([1] * 8), 2, 17, SEPARATOR)
    assert stream.rows(0, 8)["tokens"][:, 0].tolist() == [7, 3, 6, 5, 1, 2, 8, 4]
    assert stream.rows(8, 8)["tokens"][:, 0].tolist() == [3, 2, 5, 6, 1, 7, 4, 8]


def test_rows_do_not_depend_on_what_was_read_before():
    used, documents = Stream(numbered([9, 4, 6, 2]), 5, 1, SEPARATOR), numbered([9, 4, 6, 2])
    for start in (0, 40, 3, 9, 3):
        fresh = Stream(documents, 5, 1, SEPARATOR).rows(start, 7)
        again = used.rows(start, 7)
        assert all((fresh[name] == again[name]).all() for name in fresh)


def test_text_is_kept_in_its_own_width():
    assert Stream(numbered([9], np.uint8), 5, 1, SEPARATOR)._corpus.dtype == np.uint8
    assert Stream(numbered([9], np.uint16), 5, 1, SEPARATOR)._corpus.dtype == np.uint16
    wide = Stream(numbered([9], np.uint8), 5, 1, 300)
    assert wide.rows(0, 2)["tokens"][1, -1] == 300


def test_too_little_text():
    documents = numbered([4, 3])
    Stream(documents, 9, 0, SEPARATOR)
    with pytest.raises(ConfigError, match=r"train\.seq = 10 is longer .* 9 tokens .* 2 documents .*Legal: train\.seq up to 9"):
        Stream(documents, 10, 0, SEPARATOR)
    with pytest.raises(ConfigError, match="0 tokens.*Give it text"):
        Stream([], 1, 0, SEPARATOR)


def test_rows_are_numbered_from_0():
    with pytest.raises(ValueError, match="numbered from 0"):
        Stream(numbered([9]), 5, 0, SEPARATOR).rows(-1, 1)
