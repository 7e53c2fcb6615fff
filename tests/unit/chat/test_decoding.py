"""Text goes out early, and never too early."""

from byte_tokenizer import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from openforge.chat.chatml import CALL, ChatMLHermes
from openforge.chat.contract import Tool
from openforge.chat.decoding import IncrementalText, SafeContent, cut_at_stop

RENDERER = ChatMLHermes(byte_tokenizer())
VOCABULARY = byte_tokenizer().get_vocab_size()


@given(st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=4), max_size=60))
@settings(max_examples=100, deadline=None)
def test_the_pieces_of_any_ids_join_to_their_text(batches: list[list[int]]) -> None:
    stream = IncrementalText(RENDERER.text)
    told = "".join([*(stream.push(batch) for batch in batches), stream.flush()])
    assert told == RENDERER.text([token for batch in batches for token in batch])


def test_half_a_character_waits_for_its_other_half() -> None:
    stream = IncrementalText(RENDERER.text)
    ids = byte_tokenizer().encode("é", add_special_tokens=False).ids
    assert [stream.push([token]) for token in ids] == ["", "é"]


PIECES = st.sampled_from(["a", " ", "\n", "<", "<tool", CALL, "</tool_call>", "``", "`", "\n\n", "STOP", "ST", "é"])


@given(st.lists(PIECES, max_size=20), st.booleans())
@settings(max_examples=100, deadline=None)
def test_what_went_out_is_the_beginning_of_the_final_content(pieces: list[str], tools: bool) -> None:
    stops = ["```\n\n", "STOP"]
    safe = SafeContent(stops, [CALL] if tools else [])
    told = "".join(safe.push(piece) for piece in pieces)
    text = cut_at_stop("".join(pieces), stops)
    ids = byte_tokenizer().encode(text, add_special_tokens=False).ids
    assert RENDERER.parse(ids, [Tool(name="x")] if tools else ()).content.startswith(told)


def test_plain_text_goes_out_at_once() -> None:
    safe = SafeContent(["STOP"], [CALL])
    assert [safe.push(piece) for piece in ("Hello", " world", " S", "ure", " ", "<b")] == [
        "Hello",
        " world",
        "",
        " Sure",
        "",
        " <b",
    ]
