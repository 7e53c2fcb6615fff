"""What goes out with an answer comes back as it was sampled."""

import base64

import msgspec
import pytest
from conversations import WORDS
from hypothesis import given
from hypothesis import strategies as st

from openforge.chat.arguments import as_object, as_sampled
from openforge.chat.canonical import normal_arguments
from openforge.chat.sealed import given_back, seal, unseal


@given(WORDS)
def test_a_seal_gives_the_very_text_back_in_either_alphabet(text: str) -> None:
    sealed = seal(text)
    assert unseal(sealed) == text
    assert unseal(base64.urlsafe_b64encode(base64.b64decode(sealed)).decode().rstrip("=")) == text


@given(st.data())
def test_a_seal_with_another_character_is_no_seal(data: st.DataObject) -> None:
    sealed = seal("the reasoning of the model, long enough to be packed")
    place = data.draw(st.integers(0, len(sealed.rstrip("=")) - 2))
    other = data.draw(st.sampled_from([letter for letter in "ABCxyz019+/" if letter != sealed[place]]))
    assert unseal(sealed[:place] + other + sealed[place + 1 :]) is None


@given(st.text(max_size=40))
def test_any_text_is_a_seal_or_none(text: str) -> None:
    assert unseal(text) is None


def test_a_seal_that_unpacks_to_more_than_any_reasoning_is_none_of_ours() -> None:
    assert unseal(seal("x" * (9 << 20))) is None


@pytest.mark.parametrize(
    ("shown", "read"),
    [("  thought\n", "  thought\n"), ("thought", "  thought\n"), ("", "  thought\n"), ("other", "other")],
)
def test_trimmed_or_omitted_reasoning_is_what_was_sampled_and_changed_reasoning_is_not(shown: str, read: str) -> None:
    assert given_back(shown, seal("  thought\n")) == read


def test_reasoning_with_a_foreign_signature_is_what_it_shows() -> None:
    assert given_back("thought", "EqQBCkYIBxgCKkD") == "thought"


@pytest.mark.parametrize("arguments", ["", "{", '{"a": 1', "[1]", "null", "plain", '{"a":   1}', '{"a": "\\ud800"}'])
def test_arguments_travel_as_an_object_and_come_back_as_they_were_sampled(arguments: str) -> None:
    told = bytes(as_object(arguments))
    assert isinstance(msgspec.json.decode(told), dict)
    assert normal_arguments(as_sampled(told)) == normal_arguments(arguments)
    respelled = msgspec.json.encode(msgspec.json.decode(told))
    assert normal_arguments(as_sampled(respelled)) == normal_arguments(arguments)
