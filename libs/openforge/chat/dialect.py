"""What all dialects have in common: a canonical request, a canonical answer, and what can be wrong.

A dialect is one module that speaks one API on the wire, with the functions of `Dialect`. Everything behind
the codec knows only what stands here.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from openforge.chat.contract import Message, Tool, ToolChoice
from openforge.protos import FinishReason

__all__ = [
    "KEEP_ALIVE",
    "Answer",
    "BadRequest",
    "Dialect",
    "Head",
    "Problem",
    "Request",
    "Stream",
    "ToolChoice",
]

KEEP_ALIVE = b": the model is still at it\n\n"
"""A comment in a stream of server-sent events, which readers of such streams skip."""


class BadRequest(ValueError):
    """The request cannot be understood or served; the message says which field and what to do."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A model call as the harness means it.

    `asked` holds every sampling field as it came; `max_tokens`, `stop`, `tool_choice`, `parallel_calls` and `schema`
    (a JSON schema that the answer has to match, empty: free text) have an effect, the run's own sampling rules the
    rest. `schema_at` is the field in which the schema stood. `notes` say what was left out and why. `reasoning`: the
    harness takes the model's reasoning. `pictures` are the bytes of the messages' images by digest. `events`: a stream
    is made of server-sent events, else it is one JSON text.
    `beside` are fields in which harnesses say who they are, as JSON.
    `wants` and `tools_as_sent` (JSON) are for the dialect's own encoder.
    """

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_calls: bool = True
    schema: bytes = b""
    schema_at: str = ""
    stream: bool = False
    events: bool = True
    include_usage: bool = False
    reasoning: bool = True
    wants: tuple[str, ...] = ()
    tools_as_sent: msgspec.Raw = msgspec.Raw(b"[]")
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    asked: Mapping[str, Any] = {}
    beside: Mapping[str, msgspec.Raw] = {}
    notes: tuple[str, ...] = ()
    pictures: Mapping[str, bytes] = {}

    @property
    def calls(self) -> bool:
        """Whether the answer may hold tool calls."""
        return bool(self.tools) and self.tool_choice.mode != "none"

    def asked_json(self) -> bytes:
        """What the record keeps of the request beside its conversation."""
        asked = {**self.asked, "notes": self.notes} if self.notes else self.asked
        return msgspec.json.encode(asked, order="deterministic")


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an answer before its first token. `id` is bare: a dialect puts its own prefix in front."""

    id: str
    created: int
    model: str
    prompt_tokens: int = 0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """`stop` is the stop string that ended it; `reasoning_tokens` of the `completion_tokens` are reasoning;
    `cached_tokens` of the `prompt_tokens` the engine had computed before, None where it does not say.
    """

    message: Message
    finish: FinishReason
    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    cached_tokens: int | None = None
    stop: str = ""


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

    @property
    def may_pass(self) -> bool:
        """Whether the same call may be answered later."""
        return self is Problem.ENGINE_FAILED


_HTTP_STATUS = {
    Problem.BAD_REQUEST: 400,
    Problem.TOO_LONG: 400,
    Problem.OUT_OF_TURNS: 400,
    Problem.UNKNOWN_KEY: 401,
    Problem.ENDED: 409,
    Problem.NOT_FOUND: 404,
    Problem.ENGINE_FAILED: 500,
}


class Stream(Protocol):
    """One answer as events. It knows what it has told: sequence numbers, open blocks, how much of the content.

    `start` comes first and once, then reasoning and text as they are sampled, then `end` or `error`, once.
    """

    def start(self) -> bytes: ...

    def reasoning(self, text: str) -> bytes:
        """More of the reasoning; nothing where the harness does not take it."""
        ...

    def text(self, text: str) -> bytes:
        """More of the content."""
        ...

    def end(self, answer: Answer) -> bytes:
        """What of the whole answer was not told yet, its calls, and the terminal event."""
        ...

    def error(self, problem: Problem, message: str) -> bytes:
        """An end that no harness takes for an answer."""
        ...

    def keep_alive(self) -> bytes:
        """Bytes that mean nothing to the harness; empty where it bears none."""
        ...


class Dialect(Protocol):
    """The functions of a dialect's module."""

    NAME: str

    def decode(self, body: bytes, route: str) -> Request:
        """`route` is what was posted to, behind `/v1`, query included. Raises `BadRequest`, and nothing else, on any
        bytes.
        """
        ...

    def encode(self, head: Head, request: Request, answer: Answer) -> bytes: ...

    def stream(self, head: Head, request: Request) -> Stream: ...

    def error(self, problem: Problem, message: str) -> bytes: ...

    def overflow(self, prompt_tokens: int, window: int) -> str:
        """That the prompt is too long for the model's window, in the words at which its harnesses compact."""
        ...
