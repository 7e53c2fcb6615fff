"""The Gemini codec reads what harnesses send, in whatever form, and refuses the rest with a sentence."""

import base64
import json
from typing import Any

import msgspec
import pytest
from conversations import conversations, damaged
from hypothesis import given
from hypothesis import strategies as st

from openforge.chat import gemini
from openforge.chat.arguments import as_object
from openforge.chat.canonical import chain_of
from openforge.chat.contract import Message, ToolCall
from openforge.chat.dialect import Answer, BadRequest, Head, Problem, Request, ToolChoice
from openforge.chat.sealed import seal
from openforge.protos import FinishReason

HEAD = Head(id="1", created=7, model="m")
ROUTE = "v1beta/models/m:generateContent"
USER = {"role": "user", "parts": [{"text": "hi"}]}
PNG = base64.b64encode(b"png bytes").decode()
CALLS = (
    ToolCall(id="call_a", name="bash", arguments='{"command":  "ls"}'),
    ToolCall(id="call_b", name="bash", arguments='{"command": '),
)


def decoded(route: str = ROUTE, **fields: object) -> Request:
    return gemini.decode(msgspec.json.encode({"contents": [USER], **fields}), route)


# -- histories


def called(name: str, **fields: object) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": {}, **fields}}


def result(name: str, response: object, **fields: object) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": response, **fields}}


def wire_of(draw: st.DrawFn, history: list[Message]) -> dict[str, Any]:
    """The same conversation as a Gemini body: one of the many that mean it."""
    body: dict[str, Any] = {"contents": []}
    names: dict[str, str] = {}
    results: list[dict[str, Any]] = []
    for message in history:
        if message.role == "tool":
            key = draw(st.sampled_from(["output", "result"]))
            results.append(result(names[message.tool_call_id], {key: message.content}, id=message.tool_call_id))
            continue
        if results:
            body["contents"].append({"role": "user", "parts": draw(st.permutations(results))})
            results = []
        if message.role == "system":
            body["systemInstruction"] = {"parts": [{"text": message.content}]}
        elif message.role == "user":
            body["contents"].append({"role": "user", "parts": [{"text": message.content}]})
        else:
            names |= {call.id: call.name for call in message.tool_calls}
            body["contents"] += in_pieces(draw, said(draw, message))
    if results:
        body["contents"].append({"role": "user", "parts": draw(st.permutations(results))})
    return body


def said(draw: st.DrawFn, message: Message) -> list[dict[str, Any]]:
    at = draw(st.integers(0, len(message.content)))
    parts: list[dict[str, Any]] = [{"text": message.content[:at]}, {"text": message.content[at:]}]
    parts += [
        {"functionCall": {"id": call.id, "name": call.name, "args": json.loads(bytes(as_object(call.arguments)))}}
        for call in message.tool_calls
    ]
    if message.reasoning:
        parts[-1]["thoughtSignature"] = seal(message.reasoning)
    thoughts = [{"text": message.reasoning, "thought": True}] if draw(st.booleans()) else []
    return thoughts + parts


def in_pieces(draw: st.DrawFn, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One content, or a content for each part as a client has it that kept the chunks of a stream."""
    if draw(st.booleans()):
        return [{"role": "model", "parts": parts}]
    return [{"role": "model", "parts": [part]} for part in parts]


@given(st.data())
def test_a_history_in_any_of_its_forms_is_the_conversation_that_it_tells(data: st.DataObject) -> None:
    history = data.draw(conversations())
    body = data.draw(st.composite(wire_of)(history))
    read = gemini.decode(msgspec.json.encode(body), ROUTE).messages
    assert chain_of(read).value == chain_of(history).value
    assert [message.role for message in read] == [message.role for message in history]


def test_results_without_ids_belong_to_the_calls_of_their_name_in_order() -> None:
    request = decoded(
        contents=[
            USER,
            {"role": "model", "parts": [called("f"), called("g"), called("f")]},
            {
                "role": "user",
                "parts": [result("g", {"output": "2"}), result("f", {"a": 1}), result("f", {"result": "3"})],
            },
        ]
    )
    calls = [call.id for call in request.messages[1].tool_calls]
    assert [(message.tool_call_id, message.content) for message in request.messages[2:]] == [
        (calls[0], '{"a":1}'),
        (calls[1], "2"),
        (calls[2], "3"),
    ]


def test_images_are_recorded_with_their_place() -> None:
    blob = {"inlineData": {"mimeType": "image/png", "data": PNG}}
    request = decoded(contents=[{"role": "user", "parts": [{"text": "see"}, blob, {"text": "this"}]}])
    [message] = request.messages
    [image] = message.images
    assert (message.content, image.at, image.size, image.media_type) == ("see\nthis", 3, 9, "image/png")
    assert request.pictures == {image.digest: b"png bytes"}


SCHEMA = {"type": "OBJECT", "properties": {"type": {"type": "STRING", "nullable": True, "minLength": "2"}}}
PLAIN_SCHEMA = {"type": "object", "properties": {"type": {"type": ["string", "null"], "minLength": 2}}}


def test_declarations_of_both_kinds_are_tools_and_hosted_tools_are_noted() -> None:
    declared = [{"name": "f", "parameters": SCHEMA}, {"name": "g", "parametersJsonSchema": {"type": "object"}}]
    request = decoded(tools=[{"functionDeclarations": declared}, {"googleSearch": {}}])
    assert [(tool.name, tool.parameters) for tool in request.tools] == [("f", PLAIN_SCHEMA), ("g", {"type": "object"})]
    [note] = request.notes
    assert note.startswith("tools[1] of type 'googleSearch' is not offered")


def test_choices_limits_schemas_and_thinking_are_read() -> None:
    tools = [{"functionDeclarations": [{"name": "f"}, {"name": "g"}]}]

    def choice(**config: object) -> ToolChoice:
        return decoded(tools=tools, toolConfig={"functionCallingConfig": config}).tool_choice

    assert choice(mode="ANY") == ToolChoice("required")
    assert choice(mode="ANY", allowedFunctionNames=["g"]) == ToolChoice("named", ("g",))
    assert choice(mode="NONE") == ToolChoice("none")
    assert choice() == choice(mode="VALIDATED") == ToolChoice()
    config = {"temperature": 1, "maxOutputTokens": 5, "stopSequences": ["END"], "responseSchema": SCHEMA}
    request = decoded(generationConfig={**config, "thinkingConfig": {"includeThoughts": True}})
    assert (request.max_tokens, request.stop, request.reasoning) == (5, ("END",), True)
    assert json.loads(request.schema) == PLAIN_SCHEMA
    assert request.asked["generationConfig"]["temperature"] == 1
    assert json.loads(decoded(generationConfig={"responseJsonSchema": {"type": "object"}}).schema) == {"type": "object"}


def test_json_without_a_schema_is_any_object() -> None:
    asked = decoded(generationConfig={"responseMimeType": "application/json"})
    assert (asked.schema, asked.schema_at) == (b'{"type":"object"}', "generationConfig.responseMimeType")
    snake = decoded(generationConfig={"response_mime_type": "application/json", "response_schema": {"type": "STRING"}})
    assert (snake.schema, snake.schema_at) == (b'{"type":"string"}', "generationConfig.responseSchema")
    assert decoded(generationConfig={"responseMimeType": "text/plain"}).schema == b""


def test_the_route_says_which_model_and_what_form_of_answer() -> None:
    def form(route: str) -> tuple[str, bool, bool]:
        request = decoded(route)
        return request.model, request.stream, request.events

    assert form("v1beta/models/m:generateContent?") == ("m", False, False)
    assert form("v1beta/models/rec/m-2.5:streamGenerateContent?alt=sse") == ("rec/m-2.5", True, True)
    assert form("models/m:streamGenerateContent?key=k") == ("m", True, False)
    counted = gemini.decode(
        b'{"generateContentRequest": {"model": "models/m", "contents": [{"parts": [{"text": "hi"}]}]}}',
        "v1beta/models/m:countTokens",
    )
    assert counted.messages == (Message(role="user", content="hi"),)


def test_names_of_the_protocol_buffers_are_read_and_arguments_left_alone() -> None:
    history = [USER, {"role": "model", "parts": [{"function_call": {"name": "f", "args": {"function_call": 1}}}]}]
    request = decoded(contents=history, system_instruction={"parts": [{"text": "Work."}]})
    assert request.messages[0] == Message(role="system", content="Work.")
    assert json.loads(request.messages[2].tool_calls[0].arguments) == {"function_call": 1}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"contents": []}, "contents is empty"),
        ({"contents": "hi"}, r"\$\.contents"),
        ({"contents": [{"role": "king", "parts": []}]}, r"contents\[0\]\.role = 'king'"),
        ({"contents": [{"parts": [{"fileData": {"fileUri": "x"}}]}]}, r"contents\[0\]\.parts\[0\] is neither text"),
        ({"contents": [{"role": "model", "parts": [{}]}]}, r"contents\[0\]\.parts\[0\] is neither text nor"),
        ({"contents": [{"parts": [{"inlineData": {"mimeType": "audio/wav"}}]}]}, "mimeType = 'audio/wav'"),
        ({"contents": [{"parts": [{"inlineData": {"mimeType": "image/png", "data": "%"}}]}]}, "no base64"),
        ({"cachedContent": "c"}, "cachedContent = 'c'"),
        ({"generationConfig": {"candidateCount": 2}}, "candidateCount = 2"),
        ({"generationConfig": {"maxOutputTokens": 0}}, "maxOutputTokens = 0"),
        ({"generationConfig": {"stopSequences": ["x"] * 17}}, "stopSequences has 17"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "MAYBE"}}}, "mode = 'MAYBE'"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}}}, "names 'f'"),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_sentence(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        decoded(**fields)


WHOLE = {
    "systemInstruction": {"parts": [{"text": "Work."}]},
    "contents": [
        USER,
        {
            "role": "model",
            "parts": [{"text": "t", "thought": True}, {**called("f", id="a"), "thoughtSignature": seal("t")}],
        },
        {
            "role": "user",
            "parts": [result("f", {"output": "x"}, id="a"), {"inlineData": {"mimeType": "image/png", "data": PNG}}],
        },
    ],
    "tools": [{"functionDeclarations": [{"name": "f", "parameters": SCHEMA}]}],
    "tool_config": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
    "generationConfig": {
        "stopSequences": ["END"],
        "responseSchema": SCHEMA,
        "thinkingConfig": {"includeThoughts": True},
    },
}


@given(damaged(WHOLE) | st.binary(max_size=60), st.sampled_from([ROUTE, "models/m:countTokens"]))
def test_a_damaged_body_is_a_request_or_refused(body: bytes, route: str) -> None:
    try:
        request = gemini.decode(body, route)
    except BadRequest:
        return
    chain_of(request.messages)
    request.asked_json()


# -- answers


def answer(
    content: str = "", calls: tuple[ToolCall, ...] = (), reasoning: str = "", finish: FinishReason = FinishReason.STOP
) -> Answer:
    message = Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)
    return Answer(message=message, finish=finish, prompt_tokens=3, completion_tokens=5, reasoning_tokens=len(reasoning))


def asking(**fields: Any) -> Request:
    return Request(model="m", messages=(Message(role="user", content="hi"),), **fields)


def chunks(stream: bytes, events: bool) -> list[dict[str, Any]]:
    if not events:
        return list(json.loads(stream))
    assert all(line.startswith("data: ") for line in stream.decode().split("\n\n")[:-1])
    return [json.loads(line.removeprefix("data: ")) for line in stream.decode().split("\n\n")[:-1]]


@pytest.mark.parametrize("events", [True, False])
def test_a_streamed_answer_holds_what_the_whole_one_holds(events: bool) -> None:
    request = asking(reasoning=True, events=events)
    told = answer("Looking.", CALLS, "abc")
    whole = json.loads(gemini.encode(HEAD, request, told))
    stream = gemini.stream(HEAD, request)
    pieces = [stream.start(), stream.reasoning("a"), stream.reasoning("bc"), stream.text("Look"), stream.keep_alive()]
    seen = chunks(b"".join([*pieces, stream.end(told)]), events)
    parts = [part for chunk in seen for part in chunk["candidates"][0]["content"]["parts"]]
    assert all(len(chunk["candidates"][0]["content"]["parts"]) == 1 for chunk in seen)
    thoughts, text, *calls = whole["candidates"][0]["content"]["parts"]
    assert (thoughts, text) == ({"text": "abc", "thought": True}, {"text": "Looking."})
    assert "".join(part["text"] for part in parts if part.get("thought")) == "abc"
    assert "".join(part["text"] for part in parts if "text" in part and not part.get("thought")) == "Looking."
    assert [part for part in parts if "functionCall" in part] == calls
    assert [call["functionCall"]["args"] for call in calls] == [{"command": "ls"}, {"INVALID_JSON": '{"command": '}]
    assert [call.get("thoughtSignature") for call in calls] == [seal("abc"), None]
    assert [part.get("thoughtSignature") for part in parts if part.get("text") in ("Look", "ing.")] == [
        seal("abc"),
        None,
    ]
    assert seen[-1]["candidates"][0]["finishReason"] == whole["candidates"][0]["finishReason"] == "STOP"
    assert seen[-1]["usageMetadata"] == whole["usageMetadata"]
    assert whole["usageMetadata"] == {
        "promptTokenCount": 3,
        "candidatesTokenCount": 2,
        "thoughtsTokenCount": 3,
        "totalTokenCount": 8,
    }


@pytest.mark.parametrize("told", [answer("Looking.", CALLS, " abc\n"), answer("So.", reasoning="abc"), answer()])
def test_an_answer_that_comes_back_is_the_one_that_was_told_also_without_its_thoughts(told: Answer) -> None:
    for reasoning in (True, False):
        request = asking(reasoning=reasoning)
        stream = gemini.stream(HEAD, request)
        seen = chunks(stream.start() + stream.text(told.message.content[:2]) + stream.end(told), True)
        whole = [json.loads(gemini.encode(HEAD, request, told))]
        for echo in (seen, whole):
            history = [chunk["candidates"][0]["content"] for chunk in echo]
            read = decoded(contents=[USER, *history]).messages[1:]
            assert chain_of(read).value == chain_of([told.message]).value


def test_a_cut_answer_says_so() -> None:
    assert json.loads(gemini.encode(HEAD, asking(), answer("a", finish=FinishReason.LENGTH)))["candidates"] == [
        {"content": {"role": "model", "parts": [{"text": "a"}]}, "index": 0, "finishReason": "MAX_TOKENS"}
    ]


@pytest.mark.parametrize("problem", list(Problem))
def test_problems_have_the_dialects_shape(problem: Problem) -> None:
    told = json.loads(gemini.error(problem, "why"))
    assert (told["error"]["code"], told["error"]["message"]) == (problem.http_status, "why")
    assert told["error"]["status"].isupper()
    for events in (True, False):
        stream = gemini.stream(HEAD, asking(events=events))
        assert chunks(stream.start() + stream.text("a") + stream.error(problem, "why"), events)[1] == told
