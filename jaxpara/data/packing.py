"""Documents packed into rows of equal length, as an endless stream of which any rows can be had at once."""
import numpy as np

from jaxpara.errors import ConfigError


class Stream:
    """Endless rows of `seq` tokens; row r depends on the documents, `seq` and `seed` only.

    Every document is followed by one separator, which is its last token. In epoch e the documents are laid end to end in an
    order drawn from (seed, e) and cut into rows; a tail shorter than a row is dropped (what it holds differs by epoch). The rows
    are read in an order drawn after it, so that a batch is made of many documents, not of one.

    documents: list of 1-D arrays of unsigned tokens, kept in one array of their dtype. seq: tokens per row. separator: token
    id. `tokens`: of an epoch, separators counted. `epoch_rows`: rows of an epoch.
    Raises ConfigError when the documents do not fill one row.
    """

    def __init__(self, documents, seq, seed, separator):
        lengths = np.array([len(document) + 1 for document in documents], np.int64)
        self.seq, self.seed, self.tokens = seq, seed, int(lengths.sum())
        self.epoch_rows = self.tokens // seq
        if not self.epoch_rows:
            legal = f"Legal: train.seq up to {self.tokens}, or more text." if self.tokens else "Give it text."
            raise ConfigError(f"train.seq = {seq} is longer than the whole text, which has {self.tokens} tokens "
                              f"(one after each of its {len(lengths)} documents included). {legal}")
        dtype = np.result_type(np.min_scalar_type(separator), *{document.dtype for document in documents})
        self._corpus = np.full(self.tokens, separator, dtype)
        self._lengths, self._starts = lengths, np.cumsum(lengths) - lengths
        for start, document in zip(self._starts, documents):
            self._corpus[start:start + len(document)] = document
        self._last = None

    def rows(self, start, count):
        """Rows start … start + count - 1: dict of int32 [count, seq].

        tokens; targets: the next token of the text, -1 where that belongs to another document, so at each separator (a row's
        last token has its target in the row after it); segments: the document's place in the epoch's order; positions: tokens
        since the document's start or the row's, whichever is later.
        """
        if start < 0 or count < 0:
            raise ValueError(f"Rows are numbered from 0; asked for {count} from {start}.")
        rows = {name: np.empty((count, self.seq), np.int32) for name in ("tokens", "targets", "segments", "positions")}
        done = 0
        while done < count:
            epoch, row = divmod(start + done, self.epoch_rows)
            part = min(count - done, self.epoch_rows - row)
            for name, values in self._epoch_slice(epoch, slice(row, row + part)).items():
                rows[name][done:done + part] = values
            done += part
        return rows

    def _epoch_slice(self, epoch, which):
        """As `rows`, for a slice of the rows of one epoch, numbered as they are read."""
        order, ends, shuffled = self._epoch(epoch)
        row_starts = shuffled[which, None] * self.seq
        place = row_starts + np.arange(self.seq)
        segments = np.searchsorted(ends, place, side="right")
        lengths = self._lengths[order[segments]]
        offset = place - (ends[segments] - lengths)
        source = self._starts[order[segments]] + offset
        followed = offset + 1 < lengths
        return {"tokens": self._corpus[source],
                "targets": np.where(followed, self._corpus[source + followed].astype(np.int32), -1),
                "segments": segments,
                "positions": np.minimum(offset, place - row_starts)}

    def _epoch(self, epoch):
        """(order, ends, shuffled) of an epoch: int64 [documents]; which document comes n-th, and the place after its separator; int64
        [epoch_rows]; which row is read n-th."""
        if self._last is None or self._last[0] != epoch:
            # PCG64 by name: default_rng may come to mean another generator, and a resumed run would read other text.
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            order = generator.permutation(len(self._lengths))
            self._last = epoch, order, np.cumsum(self._lengths[order]), generator.permutation(self.epoch_rows)
        return self._last[1:]
