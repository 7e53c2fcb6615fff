"""The Chat Completions codec reads what harnesses send and refuses the rest with a sentence."""

import json
from typing import Any

import msgspec
import pytest
from conversations import conversations, damaged
from hypothesis import given, settings
from hypothesis import strategies as st

from openforge.chat import chat_completions
from openforge.chat.canonical import chain_of
from openforge.chat.contract import Message, Tool, ToolCall
from openforge.chat.dialect import Answer, BadRequest, Head, Problem, Request, ToolChoice
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
        Message(role="system", content="a\nb"),
        Message(role="assistant", reasoning="r", tool_calls=(ToolCall(id="x", name="f", arguments='{"a":1}'),)),
        Message(role="tool", content="ok", tool_call_id="x"),
    )
    assert request.tools == (Tool(name="f", parameters={"type": "object"}, strict=True),)
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
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "reads text and images"),
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
    assert chunks[-1]["usage"] == whole["usage"]
    assert {name: whole["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
    }


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


def decoded(**body: Any) -> Request:
    return chat_completions.decode(
        json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], **body}).encode()
    )


CUSTOM = {"type": "custom", "custom": {"name": "patch", "description": "Edit."}}
FUNCTION = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        (FUNCTION, ToolChoice("named", ("f",))),
        ({"type": "custom", "custom": {"name": "patch"}}, ToolChoice("named", ("patch",))),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [FUNCTION]}},
            ToolChoice("named", ("f",)),
        ),
    ],
)
def test_every_form_of_tool_choice_is_understood(said: object, meant: ToolChoice) -> None:
    request = decoded(tools=[FUNCTION, CUSTOM], tool_choice=said, parallel_tool_calls=False)
    assert (request.tool_choice, request.parallel_calls) == (meant, False)
    assert request.calls is (meant.mode != "none")


def test_a_tool_choice_of_no_tool_is_refused() -> None:
    with pytest.raises(BadRequest, match="tool_choice names 'g', which is no tool"):
        decoded(tools=[FUNCTION], tool_choice={"type": "function", "function": {"name": "g"}})
    with pytest.raises(BadRequest, match="tool_choice = 'maybe'"):
        decoded(tools=[FUNCTION], tool_choice="maybe")


def test_schemas_are_read_from_every_response_format() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    strict = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    assert json.loads(decoded(response_format=strict).schema) == schema
    assert decoded(response_format={"type": "json_object"}).schema == b'{"type":"object"}'
    assert decoded(response_format={"type": "text"}).schema == b""
    with pytest.raises(BadRequest, match="response_format has no schema"):
        decoded(response_format={"type": "json_schema", "json_schema": {"name": "n"}})


def test_images_leave_the_text_and_keep_their_place() -> None:
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk=", "detail": "low"}}
    far = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    parts = [{"type": "text", "text": "ab"}, url, {"type": "text", "text": "c"}, far]
    request = decoded(messages=[{"role": "user", "content": parts}])
    [message] = request.messages
    near, away = message.images
    assert message.content == "ab\nc"
    assert (near.media_type, near.size, near.at) == ("image/png", 2, 2)
    assert (away.size, away.at) == (0, 4)
    assert request.pictures == {near.digest: b"hi"}
    other = decoded(messages=[{"role": "user", "content": [*parts[:2], url]}])
    assert chain_of(other.messages).value != chain_of(request.messages).value


def test_an_image_beside_an_empty_text_in_one_part_is_not_lost() -> None:
    part = {"type": "image_url", "text": "", "image_url": {"url": "data:image/png;base64,aGk="}}
    request = decoded(messages=[{"role": "user", "content": [part]}])
    assert list(request.pictures.values()) == [b"hi"]


def test_functions_of_old_are_tools_and_are_told_as_they_were() -> None:
    history = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "ok"},
    ]
    request = decoded(messages=history, functions=[{"name": "f", "parameters": {}}], function_call={"name": "f"})
    assert [tool.name for tool in request.tools] == ["f"]
    assert (request.tool_choice, request.parallel_calls) == (ToolChoice("named", ("f",)), False)
    assert request.messages[2].tool_call_id == request.messages[1].tool_calls[0].id
    choice = json.loads(chat_completions.encode(HEAD, request, answer(calls=CALLS)))["choices"][0]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "bash", "arguments": '{"command": "ls"}'}
    stream = chat_completions.stream(HEAD, request)
    last = events(stream.start() + stream.end(answer(calls=CALLS)))[-2]["choices"]
    assert last[0]["delta"]["function_call"] == choice["message"]["function_call"]  # type: ignore[index]


def as_told(messages: list[Message]) -> list[dict[str, Any]]:
    """The conversation as a harness sends it back: answers as they were told."""
    tools = (Tool(name="f"), Tool(name="g", kind="custom"))
    request = Request(model="m", messages=(), tools=tools)
    ids: dict[str, str] = {}
    told: list[dict[str, Any]] = []
    for message in messages:
        if message.role != "assistant":
            answered = {"tool_call_id": ids[message.tool_call_id]} if message.role == "tool" else {}
            told.append({"role": message.role, "content": [{"type": "text", "text": message.content}], **answered})
            continue
        said = Answer(message=message, finish=FinishReason.STOP, prompt_tokens=1, completion_tokens=1)
        told.append(json.loads(chat_completions.encode(HEAD, request, said))["choices"][0]["message"])
        calls = told[-1].get("tool_calls", [])
        ids |= {ours.id: theirs["id"] for ours, theirs in zip(message.tool_calls, calls, strict=True)}
    return told


@given(conversations())
@settings(max_examples=100, deadline=None)
def test_a_conversation_that_comes_back_is_the_same(messages: list[Message]) -> None:
    assert chain_of(decoded(messages=as_told(messages)).messages).value == chain_of(messages).value


BODY = {
    "model": "m",
    "messages": as_told(
        [Message(role="user", content="hi"), Message(role="assistant", content="c", reasoning="r", tool_calls=CALLS)]
    ),
    "tools": [FUNCTION, CUSTOM],
    "functions": [{"name": "f", "parameters": {}}],
    "tool_choice": FUNCTION,
    "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
    "stop": ["x"],
}


@given(damaged(BODY))
@settings(max_examples=200, deadline=None)
def test_a_damaged_body_is_a_request_or_refused(body: bytes) -> None:
    try:
        request = chat_completions.decode(body)
    except BadRequest:
        return
    chain_of(request.messages)
    request.asked_json()
