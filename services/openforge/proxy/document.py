"""`python -m openforge.proxy.document`: the routes as an OpenAPI document, as it is kept in docs/.

It says where each dialect is spoken and what of a request has an effect; everything else in a body is recorded.
"""

import json
import sys
from pathlib import Path
from typing import Any

PLACE = Path("docs/proxy.openapi.json")

_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 1}
_ANY = {"type": "object", "additionalProperties": True}


def _object(required: str = "", **properties: Any) -> dict[str, Any]:
    """`required` are names of properties."""
    return {"type": "object", "required": required.split(), "properties": properties}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


def _either(*schemas: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": list(schemas)}


_FUNCTION = _object("name", name=_TEXT, description=_TEXT, parameters=_ANY)
_STOP = _either(_TEXT, _list(_TEXT))
_IMAGE = _object("type image_url", type=_one_of("image_url"), image_url=_object("url", url=_TEXT))

_CHAT = _object(
    "messages",
    model=_TEXT,
    messages=_list(
        _object(
            "role",
            role=_one_of("system", "developer", "user", "assistant", "tool", "function"),
            content=_either(_TEXT, _list(_either(_object("type text", type=_one_of("text"), text=_TEXT), _IMAGE))),
            tool_calls=_list(_object("function", id=_TEXT, function=_object("name", name=_TEXT, arguments=_TEXT))),
            tool_call_id=_TEXT,
            reasoning_content=_TEXT,
        )
    ),
    tools=_list(_object("type function", type=_one_of("function"), function=_FUNCTION)),
    tool_choice=_one_of("auto", "none", "required"),
    response_format=_object("type", type=_one_of("text", "json_object")),
    stream={"type": "boolean"},
    max_tokens=_COUNT,
    max_completion_tokens=_COUNT,
    temperature={"type": "number"},
    stop=_STOP,
)
_RESPONSES = _object(
    "input",
    model=_TEXT,
    instructions=_TEXT,
    input=_either(
        _TEXT,
        _list(
            _either(
                _object(
                    "role content",
                    type=_one_of("message"),
                    role=_one_of("system", "developer", "user", "assistant"),
                    content=_either(_TEXT, _list(_object("type text", type=_one_of("input_text"), text=_TEXT))),
                ),
                _object(
                    "type call_id name arguments",
                    type=_one_of("function_call"),
                    call_id=_TEXT,
                    name=_TEXT,
                    arguments=_TEXT,
                ),
                _object("type call_id output", type=_one_of("function_call_output"), call_id=_TEXT, output=_TEXT),
            )
        ),
    ),
    tools=_list(_object("type name", type=_one_of("function"), name=_TEXT, description=_TEXT, parameters=_ANY)),
    tool_choice=_one_of("auto", "none", "required"),
    stream={"type": "boolean"},
    max_output_tokens=_COUNT,
    temperature={"type": "number"},
)
_BLOCK = _either(
    _object("type text", type=_one_of("text"), text=_TEXT),
    _object("type id name input", type=_one_of("tool_use"), id=_TEXT, name=_TEXT, input=_ANY),
    _object("type tool_use_id", type=_one_of("tool_result"), tool_use_id=_TEXT, content=_TEXT),
    _object("type thinking", type=_one_of("thinking"), thinking=_TEXT, signature=_TEXT),
)
_MESSAGES = _object(
    "messages",
    model=_TEXT,
    system=_TEXT,
    messages=_list(_object("role content", role=_one_of("user", "assistant"), content=_either(_TEXT, _list(_BLOCK)))),
    tools=_list(_object("name", name=_TEXT, description=_TEXT, input_schema=_ANY)),
    tool_choice=_object("type", type=_one_of("auto", "any", "none")),
    stream={"type": "boolean"},
    max_tokens=_COUNT,
    stop_sequences=_list(_TEXT),
)
_PART = _either(
    _object("text", text=_TEXT),
    _object("functionCall", functionCall=_object("name", name=_TEXT, args=_ANY)),
    _object("functionResponse", functionResponse=_object("name", name=_TEXT, response=_ANY)),
)
_GEMINI = _object(
    "contents",
    contents=_list(_object("parts", role=_one_of("user", "model"), parts=_list(_PART))),
    systemInstruction=_object("parts", parts=_list(_object("text", text=_TEXT))),
    tools=_list(_object("functionDeclarations", functionDeclarations=_list(_FUNCTION))),
    generationConfig=_object(maxOutputTokens=_COUNT, temperature={"type": "number"}, stopSequences=_list(_TEXT)),
)
_HELLO = [{"role": "user", "content": "hello"}]
_CHAT_BODY = {"schema": _CHAT, "example": {"messages": _HELLO}}
_RESPONSES_BODY = {"schema": _RESPONSES, "example": {"input": "hello"}}
_MESSAGES_BODY = {"schema": _MESSAGES, "example": {"messages": _HELLO, "max_tokens": 16}}
_GEMINI_BODY = {"schema": _GEMINI, "example": {"contents": [{"role": "user", "parts": [{"text": "hello"}]}]}}
_CALLS = {
    "chat/completions": _CHAT_BODY,
    "responses": _RESPONSES_BODY,
    "responses/input_tokens": _RESPONSES_BODY,
    "messages": _MESSAGES_BODY,
    "messages/count_tokens": _MESSAGES_BODY,
    "models/{model}:generateContent": _GEMINI_BODY,
    "models/{model}:streamGenerateContent": _GEMINI_BODY,
    "models/{model}:countTokens": _GEMINI_BODY,
}
_STATUSES = {
    "200": "an answer, or its stream",
    "400": "the body cannot be read or served, or a limit is reached",
    "401": "no key, an unknown one, or that of another attempt",
    "409": "the attempt is over",
    "500": "the engine could not answer: repeat the call",
}


def openapi() -> dict[str, Any]:
    paths = {f"/ep/{{attempt}}/v1/{route}": {"post": _operation(route, body)} for route, body in _CALLS.items()} | {
        f"/ep/{{attempt}}/{route}": {"get": _operation(route, None)} for route in ("v1/models", "v1beta/models")
    }
    key = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "The proxy, as harnesses see it", "version": "1"},
        "paths": paths,
        "security": [{"key": []}],
        "components": {"securitySchemes": {"key": key}},
    }


def _operation(route: str, body: dict[str, Any] | None) -> dict[str, Any]:
    named = ["attempt", "model"] if "{model}" in route else ["attempt"]
    operation: dict[str, Any] = {
        "parameters": [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in named],
        "responses": {status: {"description": text} for status, text in _STATUSES.items()},
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": body}}
    return operation


def document() -> str:
    return json.dumps(openapi(), indent=1, sort_keys=True) + "\n"


def main() -> None:
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if PLACE.read_text() == document() else f"{PLACE} is not what the code says: run it without --check")
    PLACE.write_text(document())


if __name__ == "__main__":
    main()
