"""The same conversation in other words is the same, and nothing else is."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openforge.chat import chat_completions
from openforge.chat.canonical import Chain, chain_of, normal_arguments, retry_digest, tools_digest
from openforge.chat.contract import Message, Tool, ToolCall


def called(call_id: str, arguments: str, content: str = "") -> list[Message]:
    call = ToolCall(id=call_id, name="bash", arguments=arguments)
    return [
        Message(role="assistant", content=content, tool_calls=(call,)),
        Message(role="tool", content="ok", tool_call_id=call_id),
    ]


@pytest.mark.parametrize(
    "other",
    [
        called("call1", '{"a": 1, "b": "é"}'),
        called("call_1", '{"b":"\\u00e9","a":1.0}'),
        called("call_1", '{"a": 1, "b": "é"}', content="\n"),
    ],
)
def test_ids_spacing_escapes_and_number_forms_do_not_count(other: list[Message]) -> None:
    assert chain_of(called("call_1", '{"a": 1, "b": "é"}')).value == chain_of(other).value


@pytest.mark.parametrize(
    "other",
    [
        called("call_1", '{"a": 2}'),
        called("call_1", '{"a": "1"}'),
        called("call_1", '{"a": 1}', content="x"),
        called("call_1", '{"a": 1'),
        called("call_1", '{"a": 1}')[:1],
        called("call_1", '{"a": 1}')[::-1],
    ],
)
def test_everything_else_counts(other: list[Message]) -> None:
    assert chain_of(called("call_1", '{"a": 1}')).value != chain_of(other).value


def test_results_of_two_calls_in_the_other_order_are_another_conversation() -> None:
    calls = tuple(ToolCall(id=name, name="bash", arguments="{}") for name in "xy")
    opened = Message(role="assistant", tool_calls=calls)
    x, y = (Message(role="tool", content="ok", tool_call_id=name) for name in "xy")
    assert chain_of([opened, x, y]).value != chain_of([opened, y, x]).value


def test_reasoning_counts_for_the_value_but_not_for_the_bare_chain() -> None:
    with_it, without = (chain_of([Message(role="assistant", content="a", reasoning=text)]) for text in ("r", ""))
    assert with_it.value != without.value
    assert with_it.bare == without.bare


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
)


@given(st.dictionaries(st.text("abc", max_size=2), JSON, max_size=3))
def test_arguments_survive_another_serialiser(arguments: dict[str, object]) -> None:
    import json

    ours = msgspec.json.encode(arguments).decode()
    theirs = json.dumps(dict(reversed(arguments.items())), indent=1)
    assert normal_arguments(ours) == normal_arguments(theirs)


def digest(body: dict[str, object], attempt: str = "e-0.0", thread: str = "") -> str:
    request = chat_completions.decode(msgspec.json.encode(body))
    return retry_digest(
        attempt, "chat", thread, chain_of(request.messages), tools_digest(request.tools), request.asked_json()
    )


BODY: dict[str, object] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


@pytest.mark.parametrize(
    "change",
    [
        {"stream": True, "stream_options": {"include_usage": True}},
        {"messages": [{"content": [{"type": "text", "text": "hi"}], "role": "user", "name": None}]},
        {"metadata": {"a": 1}, "user": "u", "store": False, "prompt_cache_key": "k"},
    ],
)
def test_a_repeat_in_another_form_has_the_same_digest(change: dict[str, object]) -> None:
    assert digest(BODY) == digest(BODY | change)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"max_tokens": 6},
        {"temperature": 0.5},
        {"stop": ["x"]},
        {"tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": [{"role": "user", "content": "hi "}]},
    ],
)
def test_another_question_has_another_digest(change: dict[str, object]) -> None:
    assert digest(BODY) != digest(BODY | change)


def test_attempts_and_threads_never_share_a_digest() -> None:
    assert len({digest(BODY), digest(BODY, attempt="e-0.1"), digest(BODY, thread="t")}) == 3


def test_a_chain_taken_up_after_some_messages_is_the_chain_of_all() -> None:
    calls = tuple(ToolCall(id=name, name="f", arguments="{}") for name in ("b", "a"))
    messages = [
        Message(role="user", content="hi"),
        Message(role="assistant", reasoning="hm", tool_calls=calls),
        Message(role="tool", tool_call_id="a", content="1"),
        Message(role="tool", tool_call_id="b", content="2"),
    ]
    for at in range(len(messages)):
        before = chain_of(messages[:at])
        resumed = Chain.after(messages[:at], before.value, before.bare)
        for message in messages[at:]:
            resumed.add(message)
        assert (resumed.value, resumed.bare) == (chain_of(messages).value, chain_of(messages).bare)


def test_the_order_of_tools_counts() -> None:
    a, b = Tool(name="a"), Tool(name="b")
    chain = chain_of([])
    one, other = tools_digest([a, b]), tools_digest([b, a])
    assert retry_digest("e", "chat", "", chain, one, b"") != retry_digest("e", "chat", "", chain, other, b"")
