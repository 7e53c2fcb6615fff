"""Text becomes the ids that `tokenizers` gives it, whoever writes them."""

import logging

import pytest
from byte_tokenizer import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from openforge.chat.encoding import agree, coder, probes_of

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
MARKED = st.lists(st.one_of(TEXT, st.sampled_from(["<|im_start|>", "<|im_end|>", "<|im", " \n", "\r"])), max_size=6)


@given(MARKED.map("".join))
@settings(max_examples=200, deadline=None)
def test_ids_and_text_are_those_of_tokenizers(text: str) -> None:
    encode, decode = coder(byte_tokenizer())
    ids = byte_tokenizer().encode(text, add_special_tokens=False).ids
    assert list(encode(text)) == ids
    for some in (ids, ids[:-1], ids[1:]):
        assert decode(some) == byte_tokenizer().decode(some, skip_special_tokens=True)


def test_a_tokenizer_that_gives_other_ids_is_found_out() -> None:
    digits = Tokenizer.from_str(byte_tokenizer().to_str())
    digits.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    probes = list(probes_of(byte_tokenizer()))
    assert agree(coder(byte_tokenizer()), coder(byte_tokenizer()), probes)
    assert not agree(coder(byte_tokenizer()), coder(digits), probes)


def test_a_kind_of_tokenizer_that_fastokens_does_not_know_works_all_the_same() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    encode, decode = coder(words)
    assert list(encode("b a b")) == [1, 0, 1]
    assert decode([1, 0]) == "b a"


def test_fastokens_is_used_where_it_is_installed(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("fastokens")
    with caplog.at_level(logging.INFO, "openforge.chat"):
        coder(byte_tokenizer())
    assert not caplog.records
