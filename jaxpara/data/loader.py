"""The batches of a run: a function of the step alone."""
from jaxpara.data.packing import Stream
from jaxpara.data.sources import describe, documents
from jaxpara.data.tokenizers import tokenizer
from jaxpara.errors import ConfigError


class Loader:
    """Batches of a `Run`, from its data, model.vocab, train.batch, train.seq and train.seed; its mesh plays no part.

    `tokens`: size of the corpus, a separator after each document counted. `documents`: how many there are. `source`: what was
    read, in words. Reads all the text when constructed.
    Raises ConfigError when model.vocab is smaller than the tokenizer's, when data.path gives no text, or not one row of it.
    """

    def __init__(self, run):
        encoder = tokenizer(run.data.tokenizer)
        if run.model.vocab < encoder.vocab:
            raise ConfigError(f"model.vocab = {run.model.vocab} is too small for data.tokenizer = {run.data.tokenizer}, which has "
                              f"{encoder.vocab} tokens. Legal: {encoder.vocab} or more.")
        texts = documents(run.data.path)
        self._batch = run.train.batch
        self._stream = Stream([encoder.encode(text) for text in texts], run.train.seq, run.train.seed, encoder.separator)
        self.tokens = self._stream.tokens
        self.documents = len(texts)
        self.source = describe(run.data.path, len(texts))

    def batch(self, step):
        """The global batch of a step, counted from 0: dict of int32 [B, S], as `Stream.rows` describes them."""
        return self._stream.rows(step * self._batch, self._batch)

    def where(self, step):
        """The rows and epochs a step reads, for error messages: "rows 24 to 31 of the stream, epoch 0 (of 712 rows)"."""
        first, last = step * self._batch, (step + 1) * self._batch - 1
        epochs = sorted({row // self._stream.epoch_rows for row in (first, last)})
        return (f"rows {first} to {last} of the stream, epoch{'s' * (len(epochs) > 1)} {' to '.join(map(str, epochs))} "
                f"(of {self._stream.epoch_rows} rows)")
