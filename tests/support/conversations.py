"""Conversations as hypothesis draws them, and bodies that were damaged on the way."""

from typing import Any

import msgspec
from hypothesis import strategies as st

from openforge.chat.contract import Message, ToolCall

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=2),
    max_leaves=5,
)
_OBJECTS = st.dictionaries(st.text("abc", max_size=2), JSON, max_size=3).map(
    lambda value: msgspec.json.encode(value).decode()
)
_ARGUMENTS = _OBJECTS | st.sampled_from(["", "{", '{"a": 1', "[1]", '"text"', "null", "plain", '{"a":  1.0}'])


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """A system text or none, then questions, answers with calls and their results in the order of the calls."""
    messages = [Message(role="system", content=text)] if (text := draw(WORDS)) else []
    for step in range(draw(st.integers(1, 4))):
        messages.append(Message(role="user", content=draw(WORDS)))
        for part in range(draw(st.integers(0, 3))):
            calls = tuple(
                ToolCall(id=f"call_{step}_{part}_{index}", name=draw(st.sampled_from("fg")), arguments=draw(_ARGUMENTS))
                for index in range(draw(st.integers(0, 3)))
            )
            messages.append(Message(role="assistant", content=draw(WORDS), reasoning=draw(WORDS), tool_calls=calls))
            messages += [Message(role="tool", content=draw(WORDS), tool_call_id=call.id) for call in calls]
            if not calls:
                break
    return messages


@st.composite
def damaged(draw: st.DrawFn, body: Any) -> bytes:
    """`body` with something else in one place, or cut, or with a byte changed."""
    match draw(st.sampled_from(["value", "cut", "byte"])):
        case "value":
            return msgspec.json.encode(_replaced(draw, body))
        case "cut":
            whole = msgspec.json.encode(body)
            return whole[: draw(st.integers(0, len(whole)))]
    whole = bytearray(msgspec.json.encode(body))
    whole[draw(st.integers(0, len(whole) - 1))] = draw(st.integers(0, 255))
    return bytes(whole)


def _replaced(draw: st.DrawFn, value: Any) -> Any:
    """The same value with one of its parts, near or deep, replaced."""
    if not isinstance(value, dict | list) or not value or draw(st.integers(0, 5)) == 0:
        return draw(JSON)
    if isinstance(value, dict):
        key = draw(st.sampled_from(sorted(value)))
        return {**value, key: _replaced(draw, value[key])}
    index = draw(st.integers(0, len(value) - 1))
    return [*value[:index], _replaced(draw, value[index]), *value[index + 1 :]]
