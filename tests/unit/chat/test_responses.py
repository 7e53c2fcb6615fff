"""The Responses codec reads what harnesses send, tells answers as items and events, and refuses the rest."""

import json
from typing import Any

import pytest
from conversations import conversations, damaged
from hypothesis import given, settings
from hypothesis import strategies as st

from openforge.chat import responses
from openforge.chat.canonical import chain_of
from openforge.chat.contract import CUSTOM_PARAMETERS, Message, Tool, ToolCall
from openforge.chat.dialect import Answer, BadRequest, Head, Problem, Request, ToolChoice
from openforge.protos import FinishReason

HEAD = Head(id="1", created=7, model="m")
USER = {"role": "user", "content": "hi"}
TOOLS = (
    Tool(name="f"),
    Tool(name="g", kind="custom", parameters=CUSTOM_PARAMETERS),
    Tool(name="team.ask", namespace="team"),
)
CALLS = (
    ToolCall(id="call_a", name="f", arguments='{"command":  "ls"}'),
    ToolCall(id="call_b", name="g", arguments='{"input": "*** patch"}'),
    ToolCall(id="call_c", name="team.ask", arguments="{}"),
)
PNG = "data:image/png;base64,aGk="


def asking(**fields: Any) -> Request:
    return Request(model="m", messages=(Message(role="user", content="hi"),), tools=TOOLS, **fields)


def answer(
    content: str = "", calls: tuple[ToolCall, ...] = (), reasoning: str = "", finish: FinishReason = FinishReason.STOP
) -> Answer:
    message = Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)
    return Answer(message=message, finish=finish, prompt_tokens=3, completion_tokens=9, reasoning_tokens=4)


def decoded(**body: Any) -> Request:
    return responses.decode(json.dumps({"model": "m", "input": [USER], **body}).encode())


def test_items_become_canonical_messages_and_those_of_one_answer_one_message() -> None:
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Work."}], "id": "x"},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "look"}, {"type": "input_image", "image_url": PNG}],
        },
        {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "Hm."}], "content": None},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "So."}],
            "status": "completed",
        },
        {"type": "function_call", "call_id": "a", "name": "ask", "namespace": "team", "arguments": '{"x": 1}'},
        {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "p"},
        {"type": "function_call_output", "call_id": "a", "output": "yes"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "ok"}]},
        {"type": "web_search_call", "id": "ws", "action": {"type": "search"}},
        {"type": "message", "role": "assistant", "content": "One."},
        {"type": "message", "role": "assistant", "content": "Two."},
    ]
    request = decoded(input=items, instructions="Be brief.")
    image = request.messages[2].images[0]
    assert request.messages == (
        Message(role="system", content="Be brief."),
        Message(role="system", content="Work."),
        Message(role="user", content="look", images=(image,)),
        Message(
            role="assistant",
            content="So.",
            reasoning="Hm.",
            tool_calls=(
                ToolCall(id="a", name="team.ask", arguments='{"x": 1}'),
                ToolCall(id="b", name="patch", arguments='{"input":"p"}'),
            ),
        ),
        Message(role="tool", content="yes", tool_call_id="a"),
        Message(role="tool", content="ok", tool_call_id="b"),
        Message(role="assistant", content="One."),
        Message(role="assistant", content="Two."),
    )
    assert (image.media_type, image.size, image.at) == ("image/png", 2, 4)
    assert request.pictures == {image.digest: b"hi"}
    [note] = request.notes
    assert note.startswith("input[8] of type 'web_search_call' is left out")


def test_tools_of_every_kind_are_offered_or_noted() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /x+/"}
    request = decoded(
        tools=[
            {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True, "defer_loading": True},
            {"type": "custom", "name": "patch", "description": "Edit.", "format": grammar},
            {
                "type": "namespace",
                "name": "team",
                "description": "Others.",
                "tools": [
                    {"type": "function", "name": "ask", "description": "Ask."},
                    {"type": "function", "name": "end"},
                ],
            },
            {"type": "web_search", "external_web_access": False, "name": {}},
        ],
        tool_choice={"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "ask"}]},
    )
    assert request.tools == (
        Tool(name="f", parameters={"type": "object"}, strict=True),
        Tool(
            name="patch",
            description="Edit.\n\nThe input has to match this grammar (lark):\nstart: /x+/",
            parameters=CUSTOM_PARAMETERS,
            kind="custom",
        ),
        Tool(name="team.ask", description="Others.\n\nAsk.", namespace="team"),
        Tool(name="team.end", namespace="team"),
    )
    [note] = request.notes
    assert note.startswith("tools[3] of type 'web_search' is not offered")
    assert json.loads(request.asked_json())["notes"] == [note]
    assert request.tool_choice == ToolChoice("named", ("team.ask",))


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "f"}, ToolChoice("named", ("f",))),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            ToolChoice("auto", ("f",)),
        ),
        ({"type": "web_search"}, ToolChoice()),
    ],
)
def test_every_form_of_tool_choice_is_understood(said: object, meant: ToolChoice) -> None:
    request = decoded(tools=[{"type": "function", "name": "f"}], tool_choice=said, parallel_tool_calls=False)
    assert (request.tool_choice, request.parallel_calls) == (meant, False)


def test_limits_schemas_and_what_only_the_record_needs() -> None:
    schema = {"type": "object", "properties": {}}
    request = decoded(
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}, "verbosity": "low"},
        max_output_tokens=5,
        temperature=0.2,
        store=True,
        metadata={"a": "b"},
        client_metadata={"b": 1},
        include=[responses.ENCRYPTED],
        stream=True,
    )
    assert json.loads(request.schema) == schema
    assert (request.max_tokens, request.stream, request.wants) == (5, True, (responses.ENCRYPTED,))
    assert set(request.asked) == {"model", "text", "max_output_tokens", "temperature"}
    assert request.notes == ("store = true has no effect: responses are not kept",)
    assert decoded(text={"format": {"type": "json_object"}}).schema == b'{"type":"object"}'
    assert decoded(input="hi", previous_response_id=None, conversation=None).messages == (
        Message(role="user", content="hi"),
    )


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"input": []}, "input is empty"),
        ({"input": ""}, "input is empty"),
        ({"input": 3}, r"not a Responses request: .*\$\.input"),
        ({"input": [{"role": "king", "content": "x"}]}, r"input\[0\]\.role = 'king'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\] is an item_reference"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "not a Responses request"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "reads text and images"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,?"}]}]},
            r"input\[0\]\.content\[0\]\.image_url is no base64",
        ),
        ({"previous_response_id": "resp_1"}, "send the whole conversation in input"),
        ({"background": True}, "background = true"),
        ({"conversation": "conv_1"}, "conversation is kept nowhere"),
        ({"max_output_tokens": 0}, "max_output_tokens = 0"),
        ({"tool_choice": "maybe"}, "tool_choice = 'maybe'"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "names 'f', which is no tool"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format has no schema"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type = 'grammar'"),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_sentence(body: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        decoded(**body)


def as_items(messages: list[Message], encrypted: bool) -> list[dict[str, Any]]:
    """The conversation as a harness sends it back: answers as they were told."""
    request = asking(wants=(responses.ENCRYPTED,) if encrypted else ())
    results: dict[str, str] = {}
    items: list[dict[str, Any]] = []
    for message in messages:
        match message.role:
            case "assistant":
                told = json.loads(
                    responses.encode(
                        HEAD,
                        request,
                        Answer(message=message, finish=FinishReason.STOP, prompt_tokens=1, completion_tokens=1),
                    )
                )
                calls = [item for item in told["output"] if "call_id" in item]
                results |= {ours.id: item["call_id"] for ours, item in zip(message.tool_calls, calls, strict=True)}
                items += told["output"]
            case "tool":
                call_id = results[message.tool_call_id]
                items.append({"type": "function_call_output", "call_id": call_id, "output": message.content})
            case role:
                items.append({"role": role, "content": [{"type": "input_text", "text": message.content}]})
    return items


@given(conversations(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_conversation_that_comes_back_is_the_same(messages: list[Message], encrypted: bool) -> None:
    request = decoded(input=as_items(messages, encrypted))
    assert chain_of(request.messages).value == chain_of(messages).value


@given(conversations())
@settings(max_examples=30, deadline=None)
def test_sealed_reasoning_comes_back_where_a_harness_shows_none(messages: list[Message]) -> None:
    items = [item | {"summary": []} if item.get("type") == "reasoning" else item for item in as_items(messages, True)]
    assert chain_of(decoded(input=items).messages).value == chain_of(messages).value


BODY = {
    "model": "m",
    "input": as_items(
        [Message(role="user", content="hi"), Message(role="assistant", content="c", reasoning="r", tool_calls=CALLS)],
        True,
    ),
    "tools": [
        {"type": "function", "name": "f", "parameters": {}},
        {"type": "custom", "name": "g", "format": {"type": "text"}},
    ],
    "tool_choice": {"type": "function", "name": "f"},
    "text": {"format": {"type": "json_schema", "schema": {}}},
    "include": [responses.ENCRYPTED],
}


@given(damaged(BODY))
@settings(max_examples=200, deadline=None)
def test_a_damaged_body_is_a_request_or_refused(body: bytes) -> None:
    try:
        request = responses.decode(body)
    except BadRequest:
        return
    chain_of(request.messages)
    request.asked_json()


# -- answers


def events(stream: bytes) -> list[dict[str, Any]]:
    told = []
    for event in stream.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {told[-1]['type']}"
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    return told


PIECES = [
    [],
    [("r", "I th")],
    [("r", "I think."), ("t", "Look")],
    [("r", "I "), ("r", "think."), ("t", "Look"), ("t", "ing.")],
]


@pytest.mark.parametrize("pieces", PIECES)
def test_a_streamed_answer_holds_what_the_whole_one_holds(pieces: list[tuple[str, str]]) -> None:
    request = asking(wants=(responses.ENCRYPTED,))
    told = answer("Looking.", CALLS, "I think.")
    stream = responses.stream(HEAD, request)
    begun = [stream.start(), *(stream.reasoning(text) if kind == "r" else stream.text(text) for kind, text in pieces)]
    streamed = events(b"".join([*begun, stream.end(told)]))
    whole = json.loads(responses.encode(HEAD, request, told))
    assert streamed[-1]["type"] == "response.completed"
    assert streamed[-1]["response"] == whole
    finished = [event for event in streamed if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in finished] == whole["output"]
    assert [event["output_index"] for event in finished] == list(range(5))
    deltas: dict[str, str] = {}
    for event in streamed:
        if event["type"].endswith(".delta"):
            deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
    assert list(deltas.values()) == ["I think.", "Looking.", '{"command":  "ls"}', "*** patch", "{}"]


def test_the_order_of_events_is_that_of_the_api() -> None:
    stream = responses.stream(HEAD, asking())
    told = stream.start() + stream.reasoning("R") + stream.text("T") + stream.end(answer("T", CALLS[:2], "R"))
    assert [event["type"].removeprefix("response.") for event in events(told)] == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]


def test_calls_carry_their_kind_and_namespace() -> None:
    calls = json.loads(responses.encode(HEAD, asking(), answer(calls=CALLS)))["output"]
    assert [(call["type"], call["name"], call.get("namespace")) for call in calls] == [
        ("function_call", "f", None),
        ("custom_tool_call", "g", None),
        ("function_call", "ask", "team"),
    ]
    assert calls[1]["input"] == "*** patch"


def test_usage_tells_reasoning_apart_and_a_cut_answer_is_incomplete() -> None:
    whole = json.loads(responses.encode(HEAD, asking(), answer("a", finish=FinishReason.LENGTH)))
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["output"][0]["status"] == "incomplete"
    assert whole["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 12,
    }
    stream = responses.stream(HEAD, asking())
    told = events(stream.start() + stream.end(answer("a", finish=FinishReason.LENGTH)))
    assert told[-1]["type"] == "response.incomplete"
    assert (
        json.loads(responses.encode(HEAD, asking(), answer("a", CALLS, finish=FinishReason.LENGTH)))["status"]
        == "completed"
    )


def test_an_empty_answer_is_an_empty_message() -> None:
    [item] = json.loads(responses.encode(HEAD, asking(), answer()))["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", "")


def test_problems_have_the_dialects_shape() -> None:
    told = json.loads(responses.error(Problem.TOO_LONG, "too long"))["error"]
    assert (told["type"], told["code"], told["param"]) == ("invalid_request_error", "context_length_exceeded", "input")
    stream = responses.stream(HEAD, asking())
    last = events(stream.start() + stream.text("a") + stream.error(Problem.ENGINE_FAILED, "gone"))[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "gone"}


def test_tools_are_told_back_as_they_were_sent() -> None:
    tools: list[dict[str, Any]] = [{"type": "function", "name": "f", "strict": False}, {"type": "web_search"}]
    told = json.loads(responses.encode(HEAD, decoded(tools=tools), answer("hi")))
    assert told["tools"] == tools
    assert json.loads(responses.encode(HEAD, decoded(), answer("hi")))["tools"] == []
