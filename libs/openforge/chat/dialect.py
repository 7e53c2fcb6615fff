"""What all dialects have in common: a canonical request, a canonical answer, and what can be wrong.

A dialect is one module that speaks one API on the wire, with the functions of `Dialect`. Everything behind
the codec knows only what stands here.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from openforge.chat.contract import Message, Tool
from openforge.protos import FinishReason


class BadRequest(ValueError):
    """The request cannot be understood or served; the message says which field and what to do."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A model call as the harness means it.

    `asked` holds every sampling field as it came; only `max_tokens` and `stop` have an effect, the run's own
    sampling rules the rest. `calls` is false where the harness wants no tool calls in the answer.
    """

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    stream: bool = False
    include_usage: bool = False
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    calls: bool = True
    asked: Mapping[str, Any] = {}

    def asked_json(self) -> bytes:
        return msgspec.json.encode(self.asked, order="deterministic")


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an answer before its first token."""

    id: str
    created: int
    model: str
    include_usage: bool = False


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    message: Message
    finish: FinishReason
    prompt_tokens: int
    completion_tokens: int


class Problem(StrEnum):
    """Why a call has no answer. Never 429: a harness may take it as the end."""

    BAD_REQUEST = "bad_request"
    """The request cannot be understood."""
    TOO_LONG = "too_long"
    """The prompt leaves no room in the model's window."""
    OUT_OF_TURNS = "out_of_turns"
    """The attempt has used the turns that its limits allow."""
    UNKNOWN_KEY = "unknown_key"
    """The key is missing, unknown, or belongs to another attempt."""
    ENDED = "ended"
    """The attempt is over."""
    NOT_FOUND = "not_found"
    """There is no such route."""
    ENGINE_FAILED = "engine_failed"
    """The engine could not answer within our patience."""

    @property
    def http_status(self) -> int:
        return _HTTP_STATUS[self]


_HTTP_STATUS = {
    Problem.BAD_REQUEST: 400,
    Problem.TOO_LONG: 400,
    Problem.OUT_OF_TURNS: 400,
    Problem.UNKNOWN_KEY: 401,
    Problem.ENDED: 409,
    Problem.NOT_FOUND: 404,
    Problem.ENGINE_FAILED: 500,
}


class Dialect(Protocol):
    """The functions of a dialect's module."""

    NAME: str

    def decode(self, body: bytes) -> Request:
        """Raises `BadRequest`, and nothing else, on any bytes."""
        ...

    def encode(self, head: Head, answer: Answer) -> bytes: ...

    def stream_start(self, head: Head) -> bytes: ...

    def stream_text(self, head: Head, text: str) -> bytes: ...

    def stream_end(self, head: Head, answer: Answer, told: int) -> bytes:
        """The rest of the answer after `told` characters of content, and the terminal event."""
        ...

    def stream_error(self, problem: Problem, message: str) -> bytes:
        """An end that no harness takes for an answer."""
        ...

    def error(self, problem: Problem, message: str) -> bytes: ...
