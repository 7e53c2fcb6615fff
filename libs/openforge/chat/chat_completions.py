"""The OpenAI Chat Completions dialect: messages in, one message and its chunks out.

Promises: an answer says the same whole or as a stream; a call is told in the form in which its tool was offered.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from openforge.chat.chat_completions_request import LEGACY, decode
from openforge.chat.contract import ToolCall
from openforge.chat.dialect import KEEP_ALIVE, Answer, Head, Problem, Request
from openforge.chat.openai_forms import error_body, overflow, told_input
from openforge.protos import FinishReason

NAME = "chat"


def encode(head: Head, request: Request, answer: Answer) -> bytes:
    calls = _told_calls(request, answer.message.tool_calls)
    message: dict[str, Any] = {"role": "assistant", "content": answer.message.content or (None if calls else "")}
    if answer.message.reasoning:
        message["reasoning_content"] = answer.message.reasoning
    if calls and LEGACY in request.wants:
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
        if calls and LEGACY in self._request.wants:
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
        return "function_call" if LEGACY in request.wants else "tool_calls"
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
