"""The OpenAI Chat Completions dialect."""

from collections.abc import Sequence
from typing import Any

import msgspec

from openforge.chat.contract import Message, Tool, ToolCall
from openforge.chat.dialect import KEEP_ALIVE, Answer, BadRequest, Head, Problem, Request, ToolChoice
from openforge.protos import FinishReason

NAME = "chat"

_NOT_SAMPLING = frozenset(
    {
        "messages",
        "tools",
        "functions",
        "stream",
        "stream_options",
        "metadata",
        "client_metadata",
        "user",
        "safety_identifier",
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
    }
)
_MOST_STOPS = 16


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


class _FunctionTool(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    type: str = "function"
    function: _FunctionTool | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    """What the codec reads; the rest of the body is only recorded."""

    messages: list[_Message]
    model: str = ""
    tools: list[_Tool] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None


_BODY = msgspec.json.Decoder(_Body)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def decode(body: bytes, route: str = "chat/completions") -> Request:
    try:
        read = _BODY.decode(body)
        fields = _FIELDS.decode(body)
        asked = {name: msgspec.json.decode(raw) for name, raw in fields.items() if name not in _NOT_SAMPLING}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not a Chat Completions request: {error}") from error
    if not read.messages:
        raise BadRequest("messages is empty: send at least one message")
    if read.n not in (None, 1):
        raise BadRequest(f"n = {read.n} is not supported: send n = 1, or leave it out")
    tools, notes = _tools(read.tools or [])
    return Request(
        model=read.model,
        messages=tuple(_message(index, message) for index, message in enumerate(read.messages)),
        tools=tools,
        stream=bool(read.stream),
        include_usage=bool(read.stream_options and read.stream_options.include_usage),
        max_tokens=_max_tokens(read),
        stop=_stops(read.stop),
        tool_choice=ToolChoice("none") if asked.get("tool_choice") == "none" else ToolChoice(),
        asked=asked,
        notes=notes,
    )


def _message(index: int, message: _Message) -> Message:
    role = _ROLES.get(message.role)
    if role is None:
        raise BadRequest(f"messages[{index}].role = {message.role!r} is unknown: use one of {', '.join(_ROLES)}")
    return Message(
        role=role,  # type: ignore[arg-type]
        content=_text(index, message.content),
        reasoning=message.reasoning_content or "",
        tool_calls=tuple(_call(position, call) for position, call in enumerate(message.tool_calls or [])),
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
    )


def _text(index: int, content: str | list[_Part] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.text is None and part.refusal is None:
            raise BadRequest(f"messages[{index}] has a part of type {part.type!r}: this model reads text only")
    return "".join(part.text or part.refusal or "" for part in content)


def _call(position: int, call: _Call) -> ToolCall:
    arguments = call.function.arguments
    if isinstance(arguments, dict):
        arguments = msgspec.json.encode(arguments).decode()
    return ToolCall(id=call.id or f"call_{position}", name=call.function.name, arguments=arguments or "{}")


def _tools(tools: Sequence[_Tool]) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """The function tools, and a note for each of those that we cannot offer."""
    kept: list[Tool] = []
    notes: list[str] = []
    for index, tool in enumerate(tools):
        if tool.type != "function" or tool.function is None:
            notes.append(f"tools[{index}] of type {tool.type!r} is not offered: nobody here would run it")
            continue
        function = tool.function
        kept.append(
            Tool(name=function.name, description=function.description or "", parameters=function.parameters or {})
        )
    return tuple(kept), tuple(notes)


def _max_tokens(body: _Body) -> int | None:
    limits = [limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None]
    if any(limit < 1 for limit in limits):
        raise BadRequest(f"max_tokens = {min(limits)} is too small: ask for at least 1, or leave it out")
    return min(limits, default=None)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > _MOST_STOPS:
        raise BadRequest(f"stop has {len(stops)} strings: send at most {_MOST_STOPS}")
    return tuple(text for text in stops if text)


def encode(head: Head, request: Request, answer: Answer) -> bytes:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer.message.content or (None if answer.message.tool_calls else ""),
    }
    if answer.message.reasoning:
        message["reasoning_content"] = answer.message.reasoning
    if answer.message.tool_calls:
        message["tool_calls"] = [_told_call(call) for call in answer.message.tool_calls]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(answer)}
    return _json(_opened(head, "chat.completion") | {"choices": [choice], "usage": _usage(answer)})


class ChatStream:
    """A `Stream` of `chat.completion.chunk`s."""

    def __init__(self, head: Head, request: Request) -> None:
        self._head = head
        self._include_usage = request.include_usage
        self._reasoned = self._told = 0

    def start(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def reasoning(self, text: str) -> bytes:
        self._reasoned += len(text)
        return self._chunk({"reasoning_content": text})

    def text(self, text: str) -> bytes:
        self._told += len(text)
        return self._chunk({"content": text})

    def end(self, answer: Answer) -> bytes:
        events = []
        if thought := answer.message.reasoning[self._reasoned :]:
            events.append(self.reasoning(thought))
        if rest := answer.message.content[self._told :]:
            events.append(self.text(rest))
        for index, call in enumerate(answer.message.tool_calls):
            told = _told_call(call)
            opened = {**told, "index": index, "function": {"name": call.name, "arguments": ""}}
            filled = {"index": index, "function": {"arguments": call.arguments}}
            events += [self._chunk({"tool_calls": [opened]}), self._chunk({"tool_calls": [filled]})]
        events.append(self._chunk({}, _finish(answer)))
        if self._include_usage:
            events.append(
                _event(_opened(self._head, "chat.completion.chunk") | {"choices": [], "usage": _usage(answer)})
            )
        events.append(b"data: [DONE]\n\n")
        return b"".join(events)

    def error(self, problem: Problem, message: str) -> bytes:
        return b"data: " + error(problem, message) + b"\n\n"

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return _event(_opened(self._head, "chat.completion.chunk") | {"choices": [choice]})


def stream(head: Head, request: Request) -> ChatStream:
    return ChatStream(head, request)


_TYPES = {
    Problem.UNKNOWN_KEY: ("authentication_error", "invalid_api_key"),
    Problem.TOO_LONG: ("invalid_request_error", "context_length_exceeded"),
    Problem.OUT_OF_TURNS: ("invalid_request_error", "turn_limit_reached"),
    Problem.ENDED: ("invalid_request_error", "attempt_ended"),
    Problem.ENGINE_FAILED: ("server_error", "engine_failed"),
}


def error(problem: Problem, message: str) -> bytes:
    kind, code = _TYPES.get(problem, ("invalid_request_error", None))
    param = "messages" if problem is Problem.TOO_LONG else None
    return _json({"error": {"message": message, "type": kind, "param": param, "code": code}})


def status(problem: Problem) -> int:
    return problem.http_status


def overflow(prompt_tokens: int, window: int) -> str:
    return (
        f"This model's maximum context length is {window} tokens. However, your request has {prompt_tokens} "
        "input tokens. Please reduce the length of the messages."
    )


def models(names: Sequence[str]) -> bytes:
    """The answer to `GET /models`."""
    data = [{"id": name, "object": "model", "created": 0, "owned_by": "openforge"} for name in names]
    return _json({"object": "list", "data": data})


def _opened(head: Head, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{head.id}", "object": kind, "created": head.created, "model": head.model}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + _json(value) + b"\n\n"


def _told_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finish(answer: Answer) -> str:
    if answer.message.tool_calls:
        return "tool_calls"
    return "length" if answer.finish is FinishReason.LENGTH else "stop"


def _usage(answer: Answer) -> dict[str, int]:
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)
