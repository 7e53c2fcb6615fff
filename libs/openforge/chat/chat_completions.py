"""The OpenAI Chat Completions dialect, today's tools and the `functions` of old.

Promises: content as text or as parts, absent, null and empty are the same; what was sampled comes back as it was told.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from openforge.chat.contract import Message, Tool, ToolCall
from openforge.chat.dialect import KEEP_ALIVE, Answer, BadRequest, Head, Problem, Request, ToolChoice
from openforge.chat.fields import ABSENT, UNREADABLE, choice_of, least, not_offered, recorded, stops_of
from openforge.chat.openai_forms import (
    NOT_SAMPLING,
    CustomFormat,
    choice_in_a_word,
    custom_tool,
    error_body,
    overflow,
    sampled_arguments,
    schema_of,
    told_input,
)
from openforge.chat.parts import Gathered
from openforge.protos import FinishReason

NAME = "chat"

_NOT_SAMPLING = NOT_SAMPLING | {"messages", "functions"}
_LEGACY = "function_call"
"""What a request with `functions` wants: its call as `function_call`."""


class _ImageUrl(msgspec.Struct):
    url: str


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: _ImageUrl | str | None = None


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Custom(msgspec.Struct):
    name: str
    input: str = ""


class _Call(msgspec.Struct):
    function: _Function | None = None
    custom: _Custom | None = None
    id: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    function_call: _Function | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


class _FunctionTool(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _CustomTool(msgspec.Struct):
    name: str
    description: str | None = None
    format: dict[str, msgspec.Raw] | None = None


class _Tool(msgspec.Struct):
    type: str = "function"
    function: _FunctionTool | None = None
    custom: _CustomTool | None = None


class _Named(msgspec.Struct):
    name: str = ""


class _ChosenTool(msgspec.Struct):
    type: str = ""
    function: _Named | None = None
    custom: _Named | None = None


class _AllowedTools(msgspec.Struct):
    mode: str = "auto"
    tools: list[_ChosenTool] = []


class _Choice(msgspec.Struct):
    type: str
    function: _Named | None = None
    custom: _Named | None = None
    allowed_tools: _AllowedTools | None = None


class _JsonSchema(msgspec.Struct):
    schema: msgspec.Raw = ABSENT


class _ResponseFormat(msgspec.Struct):
    type: str
    json_schema: _JsonSchema | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    """What the codec reads; the rest of the body is only recorded."""

    messages: list[_Message]
    model: str = ""
    tools: list[_Tool] | None = None
    tool_choice: str | _Choice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[_FunctionTool] | None = None
    function_call: str | _Named | None = None
    response_format: _ResponseFormat | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None


_BODY = msgspec.json.Decoder(_Body)
_FORMAT = msgspec.json.Decoder(CustomFormat)
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


# -- requests


def decode(body: bytes, route: str = "chat/completions") -> Request:
    try:
        return _request(_BODY.decode(body), recorded(body, _NOT_SAMPLING))
    except UNREADABLE as error:
        raise BadRequest(f"the body is not a Chat Completions request: {error}") from error


def _request(read: _Body, asked: dict[str, Any]) -> Request:
    if not read.messages:
        raise BadRequest("messages is empty: send at least one message")
    if read.n not in (None, 1):
        raise BadRequest(f"n = {read.n} is not supported: send n = 1, or leave it out")
    tools, notes = _tools(read)
    history = _History()
    for index, message in enumerate(read.messages):
        history.add(f"messages[{index}]", message)
    legacy = bool(read.functions)
    return Request(
        model=read.model,
        messages=tuple(history.messages),
        tools=tools,
        tool_choice=_legacy_choice(read.function_call, tools) if legacy else _choice(read.tool_choice, tools),
        parallel_calls=read.parallel_tool_calls is not False and not legacy,
        schema=_schema(read.response_format),
        schema_at="response_format" if read.response_format else "",
        stream=bool(read.stream),
        include_usage=bool(read.stream_options and read.stream_options.include_usage),
        wants=(_LEGACY,) if legacy else (),
        max_tokens=least("max_tokens", read.max_tokens, read.max_completion_tokens),
        stop=stops_of("stop", [read.stop] if isinstance(read.stop, str) else read.stop),
        asked=asked,
        notes=notes,
        pictures=history.pictures,
    )


class _History:
    """The canonical messages of a conversation. Calls of old have no ids: they get their place as one."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.pictures: dict[str, bytes] = {}
        self._unnamed = 0

    def add(self, where: str, message: _Message) -> None:
        role = _ROLES.get(message.role)
        if role is None:
            raise BadRequest(f"{where}.role = {message.role!r} is unknown: use one of {', '.join(_ROLES)}")
        gathered = Gathered(role)
        _gather(where, message.content, gathered)
        self.pictures |= gathered.pictures
        calls = [
            self._call(f"{where}.tool_calls[{index}]", call) for index, call in enumerate(message.tool_calls or [])
        ]
        if message.function_call is not None:
            calls.append(self._call(where, _Call(function=message.function_call)))
        self.messages.append(
            gathered.message(
                reasoning=message.reasoning_content or "",
                tool_calls=tuple(calls),
                tool_call_id=self._unnamed_id() if message.role == "function" else message.tool_call_id or "",
                name=message.name or "",
            )
        )

    def _call(self, where: str, call: _Call) -> ToolCall:
        if call.custom is not None:
            call_id = call.id or self._next_id()
            return ToolCall(id=call_id, name=call.custom.name, arguments=sampled_arguments(call_id, call.custom.input))
        if call.function is None:
            raise BadRequest(f"{where} is neither a function nor a custom call: send one of them")
        arguments = call.function.arguments
        if isinstance(arguments, dict):
            arguments = msgspec.json.encode(arguments).decode()
        return ToolCall(id=call.id or self._next_id(), name=call.function.name, arguments=arguments or "{}")

    def _next_id(self) -> str:
        self._unnamed += 1
        return self._unnamed_id()

    def _unnamed_id(self) -> str:
        return f"call_{self._unnamed}"


def _gather(where: str, content: str | list[_Part] | None, gathered: Gathered) -> None:
    if content is None or isinstance(content, str):
        gathered.write(content or "")
        return
    for part in content:
        if part.image_url is not None:
            url = part.image_url if isinstance(part.image_url, str) else part.image_url.url
            gathered.show_url(f"{where}.image_url", url)
        elif part.text is None and part.refusal is None:
            raise BadRequest(f"{where} has a part of type {part.type!r}: this model reads text and images")
        else:
            gathered.write(part.text or part.refusal or "")


def _tools(read: _Body) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """The tools, and a note for each of those that we cannot offer."""
    kept: list[Tool] = []
    notes: list[str] = []
    for index, tool in enumerate(read.tools or []):
        if tool.type == "custom" and tool.custom is not None:
            kept.append(custom_tool(tool.custom.name, tool.custom.description or "", _format(tool.custom.format)))
        elif tool.type == "function" and tool.function is not None:
            kept.append(_function_tool(tool.function))
        else:
            notes.append(not_offered(f"tools[{index}]", tool.type))
    kept += [_function_tool(function) for function in read.functions or []]
    return tuple(kept), tuple(notes)


def _function_tool(function: _FunctionTool) -> Tool:
    return Tool(
        name=function.name,
        description=function.description or "",
        parameters=function.parameters or {},
        strict=bool(function.strict),
    )


def _format(form: dict[str, msgspec.Raw] | None) -> CustomFormat | None:
    """A grammar stands under its own key here."""
    return _FORMAT.decode(form["grammar"]) if form and "grammar" in form else None


def _choice(choice: str | _Choice | None, tools: Sequence[Tool]) -> ToolChoice:
    if choice is None or isinstance(choice, str):
        return choice_in_a_word(choice)
    if choice.allowed_tools is not None:
        mode = "named" if choice.allowed_tools.mode == "required" else "auto"
        names = [(tool.function or tool.custom or _Named()).name for tool in choice.allowed_tools.tools]
        return choice_of("tool_choice.allowed_tools", mode, names, tools)
    return choice_of("tool_choice", "named", [(choice.function or choice.custom or _Named()).name], tools)


def _legacy_choice(choice: str | _Named | None, tools: Sequence[Tool]) -> ToolChoice:
    if isinstance(choice, _Named):
        return choice_of("function_call", "named", [choice.name], tools)
    return ToolChoice("none") if choice == "none" else ToolChoice()


def _schema(form: _ResponseFormat | None) -> bytes:
    return (
        schema_of("response_format", form.type, form.json_schema.schema if form.json_schema else ABSENT)
        if form
        else b""
    )


# -- answers


def encode(head: Head, request: Request, answer: Answer) -> bytes:
    calls = _told_calls(request, answer.message.tool_calls)
    message: dict[str, Any] = {"role": "assistant", "content": answer.message.content or (None if calls else "")}
    if answer.message.reasoning:
        message["reasoning_content"] = answer.message.reasoning
    if calls and _LEGACY in request.wants:
        message["function_call"] = calls[0]["function"]
    elif calls:
        message["tool_calls"] = calls
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(request, answer)}
    return _json(_opened(head, "chat.completion") | {"choices": [choice], "usage": _usage(answer)})


def _told_calls(request: Request, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    custom = {tool.name for tool in request.tools if tool.kind == "custom"} if calls else set()
    return [_told_custom(call) if call.name in custom else _told_function(call) for call in calls]


def _told_function(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _told_custom(call: ToolCall) -> dict[str, Any]:
    call_id, text = told_input(call)
    return {"id": call_id, "type": "custom", "custom": {"name": call.name, "input": text}}


class ChatStream:
    """A `Stream` of `chat.completion.chunk`s."""

    def __init__(self, head: Head, request: Request) -> None:
        self._head = head
        self._request = request
        self._opening = (
            b"data: " + _json(_opened(head, "chat.completion.chunk"))[:-1] + b',"choices":[{"index":0,"delta":{'
        )
        self._reasoned = self._told = 0

    def start(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def reasoning(self, text: str) -> bytes:
        self._reasoned += len(text)
        return self._opening + b'"reasoning_content":' + _json(text) + _GOES_ON

    def text(self, text: str) -> bytes:
        self._told += len(text)
        return self._opening + b'"content":' + _json(text) + _GOES_ON

    def end(self, answer: Answer) -> bytes:
        events = []
        if thought := answer.message.reasoning[self._reasoned :]:
            events.append(self.reasoning(thought))
        if rest := answer.message.content[self._told :]:
            events.append(self.text(rest))
        calls = _told_calls(self._request, answer.message.tool_calls)
        if calls and _LEGACY in self._request.wants:
            events.append(self._chunk({"function_call": calls[0]["function"]}))
        else:
            events += [self._call(index, call) for index, call in enumerate(calls)]
        events.append(self._chunk({}, _finish(self._request, answer)))
        if self._request.include_usage:
            last = _opened(self._head, "chat.completion.chunk") | {"choices": [], "usage": _usage(answer)}
            events.append(b"data: " + _json(last) + b"\n\n")
        events.append(b"data: [DONE]\n\n")
        return b"".join(events)

    def error(self, problem: Problem, message: str) -> bytes:
        return b"data: " + error(problem, message) + b"\n\n"

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def _call(self, index: int, call: dict[str, Any]) -> bytes:
        kind = call["type"]
        field = "input" if kind == "custom" else "arguments"
        opened = call | {"index": index, kind: call[kind] | {field: ""}}
        filled = {"index": index, kind: {field: call[kind][field]}}
        return self._chunk({"tool_calls": [opened]}) + self._chunk({"tool_calls": [filled]})

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        return self._opening + _json(delta)[1:-1] + b'},"logprobs":null,"finish_reason":' + _json(finish) + b"}]}\n\n"


_GOES_ON = b'},"logprobs":null,"finish_reason":null}]}\n\n'


def stream(head: Head, request: Request) -> ChatStream:
    return ChatStream(head, request)


def error(problem: Problem, message: str) -> bytes:
    return error_body(problem, message, "messages")


def models(names: Sequence[str]) -> bytes:
    """The answer to `GET /models`."""
    data = [{"id": name, "object": "model", "created": 0, "owned_by": "openforge"} for name in names]
    return _json({"object": "list", "data": data})


def _opened(head: Head, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{head.id}", "object": kind, "created": head.created, "model": head.model}


def _finish(request: Request, answer: Answer) -> str:
    if answer.message.tool_calls:
        return "function_call" if _LEGACY in request.wants else "tool_calls"
    return "length" if answer.finish is FinishReason.LENGTH else "stop"


def _usage(answer: Answer) -> dict[str, Any]:
    usage: dict[str, Any] = {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "completion_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
    }
    if answer.cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": answer.cached_tokens}
    return usage


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)


__all__ = ["NAME", "ChatStream", "decode", "encode", "error", "models", "overflow", "stream"]
