"""Bytes there and back."""
import numpy as np
import pytest
from hypothesis import given, strategies as st

from jaxpara.data.tokenizers import ByteTokenizer, tokenizer
from jaxpara.errors import ConfigError


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_round_trip_but_for_nul(text):
    ids = tokenizer("byte").encode(text)
    assert ids.dtype == np.uint8 and ids.ndim == 1
    assert ByteTokenizer.separator not in ids
    assert tokenizer("byte").decode(ids) == text.replace("\0", "")


def test_known_bytes():
    encoder = tokenizer("byte")
    assert (encoder.vocab, encoder.separator) == (256, 0)
    assert encoder.encode("aé\0b").tolist() == [97, 0xC3, 0xA9, 98]
    assert encoder.decode([97, 0, 98]) == "a\0b"
    assert encoder.decode(np.array([0xC3], np.int32)) == "\ufffd"
    assert encoder.encode("\ud800").tolist() == [ord("?")]


@pytest.mark.parametrize("strange", [-1, 256, 97 + 256])
def test_ids_outside_the_vocabulary(strange):
    with pytest.raises(ValueError, match=f"Token {strange} is not one of the 256"):
        tokenizer("byte").decode(np.array([97, strange]))


def test_unknown_tokenizer():
    with pytest.raises(ConfigError, match=r"data\.tokenizer = bpe is not known\. Legal: byte\."):
        tokenizer("bpe")
