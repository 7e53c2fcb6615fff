"""The Anthropic Messages dialect: blocks in, blocks and their events out.

Promises: an answer says the same whole or as a stream; reasoning goes out, signed so that it comes back as it was
sampled, only where the harness takes it.
"""

from typing import Any

import msgspec

from openforge.chat.arguments import as_object
from openforge.chat.contract import Message, ToolCall
from openforge.chat.dialect import Answer, Head, Problem, Request
from openforge.chat.messages_request import decode
from openforge.chat.sealed import seal
from openforge.protos import FinishReason

NAME = "messages"


def encode(head: Head, request: Request, answer: Answer) -> bytes:
    stop_reason, stop_sequence = _stopped(request, answer)
    message = _opened(head) | {
        "content": _content(request, answer.message),
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence,
        "usage": _usage(answer.prompt_tokens, answer.completion_tokens),
    }
    return msgspec.json.encode(message)


def _opened(head: Head) -> dict[str, Any]:
    return {"id": f"msg_{head.id}", "type": "message", "role": "assistant", "model": head.model}


def _content(request: Request, said: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if said.reasoning and request.reasoning:
        blocks.append({"type": "thinking", "thinking": said.reasoning, "signature": seal(said.reasoning)})
    if said.content:
        blocks.append({"type": "text", "text": said.content})
    blocks += [_tool_use(call) | {"input": as_object(call.arguments)} for call in said.tool_calls]
    return blocks


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _stopped(request: Request, answer: Answer) -> tuple[str, str | None]:
    """Why it ended, and the harness's own stop string that ended it."""
    if answer.message.tool_calls:
        return "tool_use", None
    if answer.finish is FinishReason.LENGTH:
        return "max_tokens", None
    if answer.stop and answer.stop in request.stop:
        return "stop_sequence", answer.stop
    return "end_turn", None


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": completion_tokens,
    }


_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_START = b'event: content_block_start\ndata: {"type":"content_block_start","index":%d,"content_block":%b}\n\n'
_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":%b}\n\n'
_STOP = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n'
_TEXT = (b'{"type":"text","text":""}', b'{"type":"text_delta","text":%b}')
_THINKING = (b'{"type":"thinking","thinking":"","signature":""}', b'{"type":"thinking_delta","thinking":%b}')


class MessagesStream:
    """A `Stream` of Messages events: one block after the other, each closed before the next one opens."""

    def __init__(self, head: Head, request: Request) -> None:
        self._head = head
        self._request = request
        self._block = 0
        self._open: tuple[bytes, bytes] | None = None
        self._reasoned: list[str] = []
        self._told = 0

    def start(self) -> bytes:
        message = _opened(self._head) | {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(self._head.prompt_tokens, 1),
        }
        return _event("message_start", {"message": message}) + _PING

    def reasoning(self, text: str) -> bytes:
        if not self._request.reasoning or not text:
            return b""
        self._reasoned.append(text)
        return self._more(_THINKING, text)

    def text(self, text: str) -> bytes:
        self._told += len(text)
        return self._more(_TEXT, text)

    def end(self, answer: Answer) -> bytes:
        pieces = []
        if self._told == 0:
            pieces.append(self.reasoning(answer.message.reasoning[len("".join(self._reasoned)) :]))
        if rest := answer.message.content[self._told :]:
            pieces.append(self.text(rest))
        pieces.append(self._close())
        pieces += [self._call(call) for call in answer.message.tool_calls]
        stop_reason, stop_sequence = _stopped(self._request, answer)
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        usage = _usage(answer.prompt_tokens, answer.completion_tokens)
        pieces += [_event("message_delta", {"delta": delta, "usage": usage}), _event("message_stop", {})]
        return b"".join(pieces)

    def error(self, problem: Problem, message: str) -> bytes:
        return b"event: error\ndata: " + error(problem, message) + b"\n\n"

    def keep_alive(self) -> bytes:
        return _PING

    def _more(self, kind: tuple[bytes, bytes], text: str) -> bytes:
        opened = b"" if self._open is kind else self._close() + self._opened(kind)
        return opened + _DELTA % (self._block, kind[1] % msgspec.json.encode(text))

    def _opened(self, kind: tuple[bytes, bytes]) -> bytes:
        self._open = kind
        return _START % (self._block, kind[0])

    def _close(self) -> bytes:
        """The end of the open block, if one is open."""
        if self._open is None:
            return b""
        signed = b""
        if self._open is _THINKING:
            signature = {"type": "signature_delta", "signature": seal("".join(self._reasoned))}
            signed = _DELTA % (self._block, msgspec.json.encode(signature))
        self._open = None
        self._block += 1
        return signed + _STOP % (self._block - 1)

    def _call(self, call: ToolCall) -> bytes:
        block = self._block
        self._block += 1
        opened = msgspec.json.encode(_tool_use(call) | {"input": {}})
        filled = {"type": "input_json_delta", "partial_json": bytes(as_object(call.arguments)).decode()}
        return _START % (block, opened) + _DELTA % (block, msgspec.json.encode(filled)) + _STOP % block


def stream(head: Head, request: Request) -> MessagesStream:
    return MessagesStream(head, request)


_TYPES = {
    Problem.UNKNOWN_KEY: "authentication_error",
    Problem.NOT_FOUND: "not_found_error",
    Problem.ENDED: "conflict_error",
    Problem.ENGINE_FAILED: "api_error",
}


def error(problem: Problem, message: str) -> bytes:
    told = {"type": _TYPES.get(problem, "invalid_request_error"), "message": message}
    return msgspec.json.encode({"type": "error", "error": told, "request_id": None})


def overflow(prompt_tokens: int, window: int) -> str:
    return f"prompt is too long: {prompt_tokens} tokens > {window} maximum"


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode({"type": kind} | fields) + b"\n\n"


def counted(tokens: int) -> bytes:
    """The answer to `POST /messages/count_tokens`."""
    return msgspec.json.encode({"input_tokens": tokens})


__all__ = ["NAME", "MessagesStream", "counted", "decode", "encode", "error", "overflow", "stream"]
