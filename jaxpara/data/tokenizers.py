"""Text to token ids and back."""
import numpy as np

from jaxpara.errors import ConfigError


class ByteTokenizer:
    """One token per UTF-8 byte. Byte 0 never occurs in encoded text: it is the separator that ends a document."""

    name = "byte"
    vocab = 256
    separator = 0

    def encode(self, text):
        """str -> uint8 [bytes of the text], read-only. NUL characters are dropped; unpaired surrogates become "?"."""
        return np.frombuffer(text.replace("\0", "").encode("utf-8", errors="replace"), np.uint8)

    def decode(self, ids):
        """Ids (any 1-D sequence of whole numbers) -> str. Bytes that are not UTF-8, such as half a character at an edge, become U+FFFD.

        Raises ValueError for an id outside the vocabulary.
        """
        ids = np.asarray(ids, np.int64)
        strange = ids[(ids < 0) | (ids >= self.vocab)]
        if strange.size:
            raise ValueError(f"Token {strange[0]} is not one of the {self.vocab} of the {self.name} tokenizer.")
        return ids.astype(np.uint8).tobytes().decode("utf-8", errors="replace")


KNOWN = {kind.name: kind for kind in (ByteTokenizer,)}


def tokenizer(name):
    """The tokenizer that `data.tokenizer = name` asks for; ConfigError when there is none."""
    if name not in KNOWN:
        raise ConfigError(f"data.tokenizer = {name} is not known. Legal: {', '.join(KNOWN)}.")
    return KNOWN[name]()
