"""The Messages codec reads what harnesses send, in whatever form, and refuses the rest with a sentence."""

import base64
import json
from typing import Any

import msgspec
import pytest
from conversations import conversations, damaged
from hypothesis import given
from hypothesis import strategies as st

from openforge.chat import messages
from openforge.chat.arguments import as_object
from openforge.chat.canonical import chain_of
from openforge.chat.contract import Message, Tool, ToolCall
from openforge.chat.dialect import Answer, BadRequest, Head, Problem, Request, ToolChoice
from openforge.chat.sealed import seal
from openforge.protos import FinishReason

HEAD = Head(id="1", created=7, model="m", prompt_tokens=3)
USER = {"role": "user", "content": "hi"}
PNG = base64.b64encode(b"png bytes").decode()
CALLS = (
    ToolCall(id="call_a", name="bash", arguments='{"command":  "ls"}'),
    ToolCall(id="call_b", name="bash", arguments='{"command": '),
)


def decoded(**fields: object) -> Request:
    return messages.decode(msgspec.json.encode({"model": "m", "max_tokens": 9, "messages": [USER], **fields}))


# -- histories


def block(kind: str, **fields: object) -> dict[str, Any]:
    return {"type": kind, **fields}


def use(call_id: str, arguments: str = "{}") -> dict[str, Any]:
    return block("tool_use", id=call_id, name="f", input=json.loads(arguments))


def result(call_id: str, content: object, **fields: object) -> dict[str, Any]:
    return block("tool_result", tool_use_id=call_id, content=content, **fields)


def texts(draw: st.DrawFn, text: str) -> object:
    """A text as harnesses write it, now this way, now that way."""
    marked = block("text", text=text, cache_control={"type": "ephemeral"})
    return draw(st.sampled_from([text, [block("text", text=text)], [marked]]))


def wire_of(draw: st.DrawFn, history: list[Message]) -> dict[str, Any]:
    """The same conversation as a Messages body: one of the many that mean it."""
    body: dict[str, Any] = {"model": "m", "messages": []}
    results: list[dict[str, Any]] = []
    for message in history:
        if message.role == "tool":
            results.append(result(message.tool_call_id, texts(draw, message.content)))
            continue
        if results:
            body["messages"].append({"role": "user", "content": draw(st.permutations(results))})
            results = []
        if message.role == "system":
            body["system"] = texts(draw, message.content)
        elif message.role == "user":
            body["messages"].append({"role": "user", "content": texts(draw, message.content)})
        else:
            body["messages"].append({"role": "assistant", "content": said(draw, message)})
    if results:
        body["messages"].append({"role": "user", "content": draw(st.permutations(results))})
    return body


def said(draw: st.DrawFn, message: Message) -> object:
    thinking = block("thinking", thinking=message.reasoning, signature=seal(message.reasoning))
    omitted = block("thinking", thinking="", signature=seal(message.reasoning))
    redacted = block("redacted_thinking", data=seal(message.reasoning))
    blocks = [draw(st.sampled_from([thinking, omitted, redacted]))] if message.reasoning else []
    if message.content or not blocks:
        blocks.append(block("text", text=message.content))
    blocks += [
        block("tool_use", id=call.id, name=call.name, input=json.loads(bytes(as_object(call.arguments))))
        for call in message.tool_calls
    ]
    plain = len(blocks) == 1 and blocks[0]["type"] == "text" and draw(st.booleans())
    return message.content if plain else blocks


@given(st.data())
def test_a_history_in_any_of_its_forms_is_the_conversation_that_it_tells(data: st.DataObject) -> None:
    history = data.draw(conversations())
    body = data.draw(st.composite(wire_of)(history))
    read = messages.decode(msgspec.json.encode(body)).messages
    assert chain_of(read).value == chain_of(history).value
    assert [message.role for message in read] == [message.role for message in history]


def test_results_of_parallel_calls_stand_in_the_order_of_the_calls() -> None:
    history = [USER, {"role": "assistant", "content": [use("a"), use("b"), use("c")]}]
    whole = [
        {"role": "user", "content": [result("c", "3"), result("a", "1"), result("b", "2"), block("text", text="go")]}
    ]
    split = [
        {"role": "user", "content": [result("c", "3")]},
        {
            "role": "user",
            "content": [result("b", [block("text", text="2")]), result("a", "1"), block("text", text="go")],
        },
    ]
    first, second = (decoded(messages=[*history, *end]).messages for end in (whole, split))
    assert first == second
    assert [message.content for message in first[2:]] == ["1", "2", "3", "go"]


def test_errors_images_and_references_in_results_are_read() -> None:
    deferred = {
        "name": "late",
        "description": "Found later.",
        "input_schema": {"type": "object"},
        "defer_loading": True,
    }
    picture = block("image", source={"type": "base64", "media_type": "image/png", "data": PNG})
    request = decoded(
        tools=[{"name": "f", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}, deferred],
        messages=[
            USER,
            {"role": "assistant", "content": [use("a"), use("b"), use("c")]},
            {
                "role": "user",
                "content": [
                    result("a", [], is_error=True),
                    result("b", [block("text", text="see"), picture]),
                    result(
                        "c", [block("tool_reference", tool_name="late"), block("document", source={"type": "base64"})]
                    ),
                ],
            },
        ],
    )
    assert request.tools == (Tool(name="f", parameters={"type": "object"}),)
    failed, seen, found = request.messages[2:]
    assert failed.content == "error"
    [image] = seen.images
    assert (seen.content, image.media_type, image.size, image.at) == ("see", "image/png", 9, 3)
    assert request.pictures == {image.digest: b"png bytes"}
    reference, placeholder = found.content.split("\n")
    assert placeholder == "[document: this model reads text and images]"
    assert request.notes[0].startswith("messages[2].content[2].content[1] of type 'document' is left out")
    assert json.loads(reference) == {
        "name": "late",
        "description": "Found later.",
        "parameters": {"type": "object"},
    }


def test_reasoning_that_a_harness_changed_is_not_what_was_sampled() -> None:
    def chain(thinking: str) -> bytes:
        answer = block("thinking", thinking=thinking, signature=seal("I think."))
        return chain_of(decoded(messages=[USER, {"role": "assistant", "content": [answer]}]).messages).value

    assert chain("I think.") == chain("") == chain(" I think.\n")
    assert chain("I thought.") != chain("I think.")


def test_what_is_not_ours_to_run_or_to_follow_is_noted() -> None:
    request = decoded(
        tools=[{"type": "web_search_20250305", "name": "web_search"}, {"name": "f", "type": "custom"}],
        context_management={"edits": []},
        metadata={"user_id": "u"},
        messages=[
            USER,
            {"role": "assistant", "content": [block("server_tool_use", id="s", name="web_search", input={})]},
        ],
    )
    assert [tool.name for tool in request.tools] == ["f"]
    hosted, server, management = request.notes
    assert hosted.startswith("tools[0] of type 'web_search_20250305' is not offered")
    assert server.startswith("messages[1].content[0] of type 'server_tool_use' is left out")
    assert management.startswith("context_management has no effect")
    assert request.asked == {"model": "m", "max_tokens": 9, "context_management": {"edits": []}}


def test_choices_limits_formats_and_thinking_are_read() -> None:
    tools = [{"name": "f"}, {"name": "g"}]
    named = decoded(tools=tools, tool_choice={"type": "tool", "name": "g", "disable_parallel_tool_use": True})
    assert (named.tool_choice, named.parallel_calls) == (ToolChoice("named", ("g",)), False)
    assert decoded(tools=tools, tool_choice={"type": "any"}).tool_choice == ToolChoice("required")
    assert not decoded(tools=tools, tool_choice={"type": "none"}).calls
    schema = {"type": "object", "properties": {}}
    for form in (
        {"output_config": {"effort": "high", "format": {"type": "json_schema", "schema": schema}}},
        {"output_format": {"type": "json_schema", "schema": schema}},
    ):
        assert json.loads(decoded(**form).schema) == schema
    assert decoded(stop_sequences=["END", ""]).stop == ("END",)
    assert [decoded(thinking={"type": kind}).reasoning for kind in ("enabled", "adaptive", "disabled")] == [
        True,
        True,
        False,
    ]
    assert not decoded().reasoning


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": "hi"}, r"\$\.messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, r"messages\[0\]\.role = 'king'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
            r"messages\[0\]\.content\[0\] has type 'video'",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id is missing"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "name is missing"),
        (
            {"messages": [{"role": "user", "content": [block("image", source={"type": "base64", "data": "%"})]}]},
            "no base64",
        ),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences has 17"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice names 'f', which is no tool"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type = 'maybe'"),
        ({"tools": [{"description": "x"}]}, r"tools\[0\]\.name is missing"),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_sentence(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        decoded(**fields)


WHOLE = {
    "model": "m",
    "max_tokens": 9,
    "system": [block("text", text="Work.", cache_control={"type": "ephemeral"})],
    "messages": [
        USER,
        {
            "role": "assistant",
            "content": [block("thinking", thinking="t", signature=seal("t")), use("a", '{"x": [1]}')],
        },
        {"role": "user", "content": [result("a", [block("image", source={"type": "url", "url": "http://x/y.png"})])]},
        {"role": "system", "content": "More."},
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}, "defer_loading": False}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "stop_sequences": ["END"],
    "output_config": {"format": {"type": "json_schema", "schema": {}}},
    "context_management": {"edits": []},
}


@given(damaged(WHOLE) | st.binary(max_size=60))
def test_a_damaged_body_is_a_request_or_refused(body: bytes) -> None:
    try:
        request = messages.decode(body)
    except BadRequest:
        return
    chain_of(request.messages)
    request.asked_json()


def test_nesting_without_end_is_refused() -> None:
    with pytest.raises(BadRequest, match="not a Messages request"):
        messages.decode(b'{"messages": [{"role": "user", "content": ' + b"[" * 5000 + b"]" * 5000 + b"}]}")


# -- answers


def answer(
    content: str = "", calls: tuple[ToolCall, ...] = (), reasoning: str = "", finish: FinishReason = FinishReason.STOP
) -> Answer:
    message = Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)
    return Answer(message=message, finish=finish, prompt_tokens=3, completion_tokens=2)


def asking(**fields: Any) -> Request:
    return Request(model="m", messages=(Message(role="user", content="hi"),), **fields)


def events(stream: bytes) -> list[dict[str, Any]]:
    told = []
    for event in stream.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {told[-1]['type']}"
    return told


def assembled(told: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a reader of the stream has at its end."""
    assert [event["type"] for event in told[:2]] == ["message_start", "ping"]
    message = told[0]["message"]
    parts: list[str] = []
    for event in told[2:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                parts = []
            case "content_block_delta":
                last = message["content"][-1]
                for key, piece in event["delta"].items():
                    if key == "partial_json":
                        parts.append(piece)
                    elif key != "type":
                        last[key] += piece
            case "content_block_stop":
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = json.loads("".join(parts))
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    assert told[-1]["type"] == "message_stop"
    return dict(message)


def test_a_streamed_answer_holds_what_the_whole_one_holds() -> None:
    request = asking(reasoning=True)
    told = answer("Looking.", CALLS, "I think.")
    whole = json.loads(messages.encode(HEAD, request, told))
    for pieces in ([], [("r", "I th")], [("r", "I think."), ("t", "Look")], [("t", "Look"), ("t", "ing.")]):
        stream = messages.stream(HEAD, request)
        begun = [
            stream.start(),
            *(stream.reasoning(text) if kind == "r" else stream.text(text) for kind, text in pieces),
        ]
        streamed = assembled(events(b"".join([*begun, stream.end(told)])))
        if pieces[:1] == [("t", "Look")]:
            assert [kept["type"] for kept in streamed.pop("content")] == ["text", "tool_use", "tool_use"]
            assert streamed == {key: value for key, value in whole.items() if key != "content"}
        else:
            assert streamed == whole
    assert [kept["type"] for kept in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole["content"][2]["input"] == {"command": "ls"}
    assert whole["content"][3]["input"] == {"INVALID_JSON": '{"command": '}
    assert whole["usage"]["input_tokens"] == 3
    assert whole["usage"]["output_tokens"] == 2


def test_an_answer_that_comes_back_is_the_one_that_was_told() -> None:
    request = asking(reasoning=True)
    told = answer("Looking.", CALLS, " I think.\n")
    echo = json.loads(messages.encode(HEAD, request, told))
    read = decoded(messages=[USER, {"role": "assistant", "content": echo["content"]}]).messages[1]
    assert chain_of([read]).value == chain_of([told.message]).value
    assert read.tool_calls[1].arguments == CALLS[1].arguments


def test_reasoning_goes_only_to_those_who_asked_for_it() -> None:
    told = answer("So.", reasoning="I think.")
    assert [kept["type"] for kept in json.loads(messages.encode(HEAD, asking(reasoning=False), told))["content"]] == [
        "text"
    ]
    stream = messages.stream(HEAD, asking(reasoning=False))
    assert stream.reasoning("I think.") == b""
    assert b"think" not in stream.start() + stream.text("So.") + stream.end(told)


@pytest.mark.parametrize(
    ("told", "reason", "sequence"),
    [
        (answer("a"), "end_turn", None),
        (answer("a", CALLS), "tool_use", None),
        (answer("a", finish=FinishReason.LENGTH), "max_tokens", None),
        (msgspec.structs.replace(answer("a"), stop="END"), "stop_sequence", "END"),
        (msgspec.structs.replace(answer("a"), stop="the run's own"), "end_turn", None),
    ],
)
def test_the_end_says_why(told: Answer, reason: str, sequence: str | None) -> None:
    request = asking(stop=("END",))
    whole = json.loads(messages.encode(HEAD, request, told))
    stream = messages.stream(HEAD, request)
    streamed = assembled(events(stream.start() + stream.end(told)))
    for seen in (whole, streamed):
        assert (seen["stop_reason"], seen["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize("problem", list(Problem))
def test_problems_have_the_dialects_shape(problem: Problem) -> None:
    told = json.loads(messages.error(problem, "why"))
    assert (told["type"], told["error"]["message"]) == ("error", "why")
    assert told["error"]["type"].endswith("_error")
    [event] = events(messages.stream(HEAD, asking()).error(problem, "why"))
    assert event == told
    assert messages.overflow(5, 4) == "prompt is too long: 5 tokens > 4 maximum"
