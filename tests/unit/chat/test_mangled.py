"""Whatever is sent to any dialect becomes a request or is refused: never another exception."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from openforge.chat import chat_completions, gemini, messages, responses
from openforge.chat.dialect import BadRequest, Dialect, Request

TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
IMAGE = "data:image/png;base64,aGk="
BODIES: dict[str, dict[str, Any]] = {
    "chat": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "t"}, {"type": "image_url", "image_url": {"url": IMAGE}}],
            },
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "r",
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                    {"id": "d", "type": "custom", "custom": {"name": "g", "input": "i"}},
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "out"},
        ],
        "tools": [{"type": "function", "function": TOOL}, {"type": "custom", "custom": {"name": "g"}}],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        "stream_options": {"include_usage": True},
        "max_tokens": 5,
        "stop": ["a"],
    },
    "responses": {
        "model": "m",
        "instructions": "i",
        "input": [
            {"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}], "encrypted_content": "x"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": "n"},
            {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "i"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "o"}]},
        ],
        "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", **TOOL}]}, {"type": "web_search"}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        "max_output_tokens": 5,
        "include": ["reasoning.encrypted_content"],
    },
    "messages": {
        "model": "m",
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "r", "signature": "x"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"INVALID_JSON": "{"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "is_error": True,
                        "content": [
                            {
                                "type": "image",
                                "source": {"type": "base64", "media_type": "image/png", "data": "aGk="},
                            }
                        ],
                    },
                    {"type": "document", "source": {"type": "text", "data": "d"}},
                ],
            },
        ],
        "tools": [{"name": "f", "input_schema": TOOL["parameters"], "defer_loading": False}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        "thinking": {"type": "enabled"},
        "max_tokens": 5,
        "stop_sequences": ["a"],
    },
    "gemini": {
        "systemInstruction": {"parts": [{"text": "s"}]},
        "contents": [
            {"role": "user", "parts": [{"text": "t"}, {"inlineData": {"mimeType": "image/png", "data": "aGk="}}]},
            {
                "role": "model",
                "parts": [
                    {"text": "r", "thought": True},
                    {"functionCall": {"name": "f", "args": {"a": 1}, "id": "c"}, "thoughtSignature": "x"},
                ],
            },
            {"role": "user", "parts": [{"functionResponse": {"name": "f", "id": "c", "response": {"output": "o"}}}]},
        ],
        "tools": [{"function_declarations": [TOOL]}, {"googleSearch": {}}],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
        "generationConfig": {
            "maxOutputTokens": 5,
            "stopSequences": ["a"],
            "responseSchema": {"type": "OBJECT", "properties": {"a": {"type": "STRING", "minLength": "1"}}},
            "thinkingConfig": {"includeThoughts": True},
        },
    },
}
DIALECTS: dict[str, Dialect] = {
    "chat": chat_completions,
    "responses": responses,
    "messages": messages,
    "gemini": gemini,
}
ROUTES = {"gemini": "v1beta/models/m:streamGenerateContent?alt=sse"}

odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["", "auto", "json_schema", "text", "data:,", "data:image/png;base64,%", "\ud800", "tool_result"]),
    st.builds(list),
    st.builds(dict),
    st.builds(lambda: [[]]),
    st.builds(lambda: {"type": "image"}),
)


@st.composite
def mangled(draw: st.DrawFn) -> tuple[str, bytes]:
    """A body with a few values replaced, dropped, doubled or grafted from elsewhere, and sometimes bytes changed."""
    name = draw(st.sampled_from(sorted(BODIES)))
    body = json.loads(json.dumps(BODIES[name]))
    for _ in range(draw(st.integers(1, 4))):
        places = list(_places(body))
        holder, key = draw(st.sampled_from(places))
        match draw(st.sampled_from(["replace", "drop", "graft", "wrap"])):
            case "replace":
                holder[key] = draw(odd)
            case "drop":
                del holder[key]
            case "graft":
                other, at = draw(st.sampled_from(places))
                holder[key] = json.loads(json.dumps(other[at])) if at in _keys(other) else None
            case "wrap":
                holder[key] = [holder[key]]
        if not body:
            break
    data = json.dumps(body).encode()
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=3)) + data[at + draw(st.integers(0, 3)) :]
    return name, data


def _keys(holder: Any) -> Any:
    return holder if isinstance(holder, dict) else range(len(holder))


def _places(value: Any) -> Any:
    """Every place in a JSON value, as what holds it and the key."""
    for key in list(_keys(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def is_a_request_or_refused(mangled_body: tuple[str, bytes]) -> None:
    name, data = mangled_body
    dialect = DIALECTS[name]
    try:
        request = dialect.decode(data, ROUTES.get(name, name))
    except BadRequest:
        return
    assert isinstance(request, Request)
    assert request.messages
    request.asked_json()


DEEP = b"[" * 100_000
SURROGATE = b'{"messages":[{"role":"user","content":"\\ud800"}]}'


@pytest.mark.parametrize("name", sorted(BODIES))
def test_the_bodies_that_are_mangled_here_are_whole_before(name: str) -> None:
    assert DIALECTS[name].decode(json.dumps(BODIES[name]).encode(), ROUTES.get(name, name)).messages


def checked(examples: int) -> Callable[[], None]:
    @settings(max_examples=examples, derandomize=True)  # a finding belongs to the change that made it
    @given(mangled())
    @example(("chat", DEEP))
    @example(("gemini", b'{"contents":' + DEEP))
    @example(("messages", SURROGATE))
    @example(("responses", b'{"model": "m", "input": [{"type": "input_text", "text": "o"}]}'))
    def check(mangled_body: tuple[str, bytes]) -> None:
        is_a_request_or_refused(mangled_body)

    return check


def test_a_mangled_body_of_any_dialect_is_a_request_or_refused() -> None:
    checked(400)()


@pytest.mark.heavy
def test_ten_thousand_mangled_bodies_are_requests_or_refused() -> None:
    checked(10_000)()
