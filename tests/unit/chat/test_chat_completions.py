"""The Chat Completions codec reads what harnesses send and refuses the rest with a sentence."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openforge.chat import chat_completions
from openforge.chat.contract import Message, ToolCall
from openforge.chat.dialect import Answer, BadRequest, Head, Problem, Request
from openforge.protos import FinishReason

HEAD = Head(id="1", created=7, model="m")
REQUEST = Request(model="m", messages=(Message(role="user", content="hi"),), include_usage=True)
CALLS = (ToolCall(id="call_a", name="bash", arguments='{"command": "ls"}'),)


def answer(content: str = "", calls: tuple[ToolCall, ...] = (), finish: FinishReason = FinishReason.STOP) -> Answer:
    message = Message(role="assistant", content=content, tool_calls=calls)
    return Answer(message=message, finish=finish, prompt_tokens=3, completion_tokens=2)


def test_roles_parts_nulls_and_object_arguments_become_canonical() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    body = {
        "model": "m",
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "r", "audio": None},
            {"role": "tool", "tool_call_id": "x", "content": "ok"},
        ],
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}},
            {"type": "web_search"},
        ],
        "max_tokens": 9,
        "max_completion_tokens": 5,
        "stop": "END",
        "temperature": 0.2,
    }
    request = chat_completions.decode(json.dumps(body).encode())
    assert request.messages == (
        Message(role="system", content="ab"),
        Message(role="assistant", reasoning="r", tool_calls=(ToolCall(id="x", name="f", arguments='{"a":1}'),)),
        Message(role="tool", content="ok", tool_call_id="x"),
    )
    assert [tool.name for tool in request.tools] == ["f"]
    assert (request.max_tokens, request.stop) == (5, ("END",))
    assert request.asked["temperature"] == 0.2
    [note] = request.notes
    assert note.startswith("tools[1] of type 'web_search' is not offered")
    assert json.loads(request.asked_json())["notes"] == [note]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not a Chat Completions request"),
        (b"[]", "Expected `object`, got `array`"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "not a Chat Completions request"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "not a Chat Completions request"),
        (b'{"messages": "hi"}', r"\$\.messages"),
        (b'{"messages": []}', "messages is empty"),
        (b'{"messages": [{"role": "king", "content": "x"}]}', r"messages\[0\]\.role = 'king'"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "reads text only"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 2}', "n = 2"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', "max_tokens = 0"),
        (b'{"messages": [{"role": "user", "content": "x"}], "x": ' + b"[" * 5000 + b"]" * 5000 + b"}", "request"),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_sentence(body: bytes, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        chat_completions.decode(body)


@given(st.binary(max_size=80) | st.text(max_size=60).map(str.encode))
def test_any_bytes_are_a_request_or_refused(body: bytes) -> None:
    for candidate in (body, b'{"messages": [{"role": "user", "content": "' + body + b'"}]}'):
        try:
            chat_completions.decode(candidate)
        except BadRequest:
            continue


def events(stream: bytes) -> list[dict[str, object]]:
    lines = [line.removeprefix("data: ") for line in stream.decode().split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_streamed_answer_holds_what_the_whole_one_holds() -> None:
    told = answer("Looking.", CALLS)
    whole = json.loads(chat_completions.encode(HEAD, REQUEST, told))
    stream = chat_completions.stream(HEAD, REQUEST)
    chunks = events(stream.start() + stream.text("Look") + stream.end(told))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]  # type: ignore[index]
    assert "".join(delta.get("content", "") for delta in deltas) == whole["choices"][0]["message"]["content"]
    functions = [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta]
    assert "".join(function["arguments"] for function in functions) == CALLS[0].arguments
    assert chunks[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "tool_calls"  # type: ignore[index]
    assert chunks[-1]["usage"] == whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def test_content_is_null_only_beside_calls_and_length_is_told() -> None:
    def choice(told: Answer) -> dict[str, object]:
        return dict(json.loads(chat_completions.encode(HEAD, REQUEST, told))["choices"][0])

    assert choice(answer("", CALLS))["message"]["content"] is None  # type: ignore[index]
    assert choice(answer(""))["message"]["content"] == ""  # type: ignore[index]
    assert choice(answer("a", finish=FinishReason.LENGTH))["finish_reason"] == "length"


def test_problems_have_the_dialects_shape_and_are_never_429() -> None:
    told = msgspec.json.decode(chat_completions.error(Problem.TOO_LONG, "too long"))["error"]
    assert (told["type"], told["code"], told["message"]) == (
        "invalid_request_error",
        "context_length_exceeded",
        "too long",
    )
    assert all(problem.http_status != 429 for problem in Problem)
