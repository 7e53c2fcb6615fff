"""Text goes out early, and never too early."""

from byte_tokenizer import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from openforge.chat.chatml import CALL, THINK, THOUGHT, ChatMLHermes
from openforge.chat.contract import Tool
from openforge.chat.decoding import IncrementalText, SafeAnswer, SafeContent, cut_at_stop, first_stop, reasoning_length

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


PIECES = st.sampled_from(
    ["a", " ", "\n", "<", "<tool", CALL, "</tool_call>", "``", "`", "\n\n", "STOP", "ST", "é", THINK, THOUGHT, "</th"]
)


@given(st.sampled_from(["", THINK, f"\n {THINK}\n"]), st.lists(PIECES, max_size=20), st.booleans())
@settings(max_examples=200, deadline=None)
def test_what_went_out_is_the_beginning_of_the_final_answer(opening: str, pieces: list[str], tools: bool) -> None:
    stops = ["```\n\n", "STOP"]
    safe = SafeAnswer(RENDERER.thinking, stops, [CALL] if tools else [])
    told = [safe.push(piece) for piece in (opening, *pieces)]
    text = cut_at_stop("".join([opening, *pieces]), stops)
    ids = byte_tokenizer().encode(text, add_special_tokens=False).ids
    parsed = RENDERER.parse(ids, [Tool(name="x")] if tools else ())
    assert parsed.reasoning.startswith("".join(reasoning for reasoning, _ in told))
    assert parsed.content.startswith("".join(content for _, content in told))


def test_reasoning_goes_out_as_reasoning_and_the_rest_as_content() -> None:
    safe = SafeAnswer(RENDERER.thinking, [], [CALL])
    pieces = ("<th", "ink>", "\n", "Hm", ".\n", "So", "\n</thi", "nk>\n", "\nYes", ".")
    assert [safe.push(piece) for piece in pieces] == [
        ("", ""),
        ("", ""),
        ("", ""),
        ("Hm", ""),
        (".", ""),
        ("\nSo", ""),
        ("", ""),
        ("", ""),
        ("", "Yes"),
        ("", "."),
    ]


def test_reasoning_is_counted_with_its_marks() -> None:
    thought = byte_tokenizer().encode(f"{THINK}\nHm.\n{THOUGHT}", add_special_tokens=False).ids
    ids = [*thought, *byte_tokenizer().encode("\n\nYes.", add_special_tokens=False).ids]
    assert reasoning_length(RENDERER.text, ids, THOUGHT) == len(thought)
    assert reasoning_length(RENDERER.text, ids[:5], THOUGHT) == 5


def test_the_first_stop_in_the_text_ends_it() -> None:
    assert first_stop("abc", ["c", "b"]) == "b"
    assert first_stop("abc", ["x"]) == ""


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
