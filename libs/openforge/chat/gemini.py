"""The Gemini dialect: `generateContent`, `streamGenerateContent` as events or as one JSON array, `countTokens`.

Promises: an answer goes out whole or in pieces, and either way its reasoning goes with it as a thought signature.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from openforge.chat.arguments import as_object
from openforge.chat.contract import Message
from openforge.chat.dialect import Answer, Head, Problem, Request
from openforge.chat.gemini_request import decode
from openforge.chat.sealed import seal
from openforge.protos import FinishReason

NAME = "gemini"


def counted(tokens: int) -> bytes:
    """The answer to `countTokens`."""
    return msgspec.json.encode({"totalTokens": tokens})


def models(names: Sequence[str]) -> bytes:
    """The answer to `GET /v1beta/models`."""
    methods = ["generateContent", "countTokens"]
    listed = [{"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": methods} for name in names]
    return msgspec.json.encode({"models": listed})


def encode(head: Head, request: Request, answer: Answer) -> bytes:
    parts = _parts(request, answer.message, 0, 0)
    return msgspec.json.encode(_chunk(head, parts, _finish(answer)) | {"usageMetadata": _usage(answer)})


def _parts(request: Request, said: Message, thought: int, told: int) -> list[dict[str, Any]]:
    """What of a message is not told yet. The seal of its reasoning is on the first call, else on the text."""
    parts: list[dict[str, Any]] = []
    if request.reasoning and told == 0 and (thoughts := said.reasoning[thought:]):
        parts.append({"text": thoughts, "thought": True})
    if (rest := said.content[told:]) or not said.tool_calls:
        parts.append({"text": rest})
    parts += [
        {"functionCall": {"id": call.id, "name": call.name, "args": as_object(call.arguments)}}
        for call in said.tool_calls
    ]
    if said.reasoning:
        parts[-max(1, len(said.tool_calls))]["thoughtSignature"] = seal(said.reasoning)
    return parts


def _finish(answer: Answer) -> str:
    cut = answer.finish is FinishReason.LENGTH and not answer.message.tool_calls
    return "MAX_TOKENS" if cut else "STOP"


def _usage(answer: Answer) -> dict[str, int]:
    usage = {
        "promptTokenCount": answer.prompt_tokens,
        "candidatesTokenCount": answer.completion_tokens - answer.reasoning_tokens,
        "totalTokenCount": answer.prompt_tokens + answer.completion_tokens,
    }
    if answer.reasoning_tokens:
        usage["thoughtsTokenCount"] = answer.reasoning_tokens
    if answer.cached_tokens is not None:
        usage["cachedContentTokenCount"] = answer.cached_tokens
    return usage


def _chunk(head: Head, parts: Sequence[dict[str, Any]], finish: str | None = None) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": 0}
    if finish is not None:
        candidate["finishReason"] = finish
    return {"candidates": [candidate], "modelVersion": head.model, "responseId": head.id}


class GeminiStream:
    """A `Stream` of chunks of one part each, as server-sent events or as the items of one array."""

    def __init__(self, head: Head, request: Request) -> None:
        self._head = head
        self._request = request
        self._thoughts: list[str] = []
        self._told = 0
        self._chunks = 0

    def start(self) -> bytes:
        return b"" if self._request.events else b"["

    def reasoning(self, text: str) -> bytes:
        if not self._request.reasoning or not text:
            return b""
        self._thoughts.append(text)
        return self._item(_chunk(self._head, [{"text": text, "thought": True}]))

    def text(self, text: str) -> bytes:
        """The first piece carries the seal of the thoughts before it: clients that join pieces keep what that has."""
        part = {"text": text}
        if self._thoughts and not self._told:
            part["thoughtSignature"] = seal("".join(self._thoughts))
        self._told += len(text)
        return self._item(_chunk(self._head, [part]))

    def end(self, answer: Answer) -> bytes:
        *parts, last = _parts(self._request, answer.message, len("".join(self._thoughts)), self._told)
        items = [self._item(_chunk(self._head, [part])) for part in parts]
        ending = _chunk(self._head, [last], _finish(answer)) | {"usageMetadata": _usage(answer)}
        return b"".join([*items, self._item(ending), self._closed()])

    def error(self, problem: Problem, message: str) -> bytes:
        return self._item(_problem(problem, message)) + self._closed()

    def keep_alive(self) -> bytes:
        """White space in an array; no harness of this dialect is known to bear a sign of life between events."""
        return b"" if self._request.events else b"\n"

    def _item(self, chunk: dict[str, Any]) -> bytes:
        body = msgspec.json.encode(chunk)
        self._chunks += 1
        if self._request.events:
            return b"data: " + body + b"\n\n"
        return body if self._chunks == 1 else b",\r\n" + body

    def _closed(self) -> bytes:
        return b"" if self._request.events else b"]"


def stream(head: Head, request: Request) -> GeminiStream:
    return GeminiStream(head, request)


_STATUS = {
    Problem.UNKNOWN_KEY: "UNAUTHENTICATED",
    Problem.OUT_OF_TURNS: "FAILED_PRECONDITION",
    Problem.NOT_FOUND: "NOT_FOUND",
    Problem.ENDED: "ABORTED",
    Problem.ENGINE_FAILED: "INTERNAL",
}


def error(problem: Problem, message: str) -> bytes:
    return msgspec.json.encode(_problem(problem, message))


def overflow(prompt_tokens: int, window: int) -> str:
    return f"The input token count ({prompt_tokens}) exceeds the maximum number of tokens allowed ({window})."


def _problem(problem: Problem, message: str) -> dict[str, Any]:
    return {
        "error": {"code": problem.http_status, "message": message, "status": _STATUS.get(problem, "INVALID_ARGUMENT")}
    }


__all__ = ["NAME", "GeminiStream", "counted", "decode", "encode", "error", "models", "overflow", "stream"]
