"""Which dialect is spoken where. The one place that knows.

Promises: every route has a dialect, so that whatever a harness asks for, it is answered in the shape it expects.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from openforge.chat import chat_completions, gemini, messages, responses
from openforge.chat.dialect import Dialect

_VERSION = re.compile(r"^(/*v1(?=/|$))+")


@dataclass(slots=True, frozen=True)
class Generate:
    """A model call."""

    dialect: Dialect


@dataclass(slots=True, frozen=True)
class Count:
    """How long the prompt of such a call would be. `counted` tells a number of tokens."""

    dialect: Dialect
    counted: Callable[[int], bytes]


@dataclass(slots=True, frozen=True)
class Models:
    """What there is to call. `listed` tells names."""

    dialect: Dialect
    listed: Callable[[Sequence[str]], bytes]


Service = Generate | Count | Models


def listed(names: Sequence[str]) -> bytes:
    """One answer in which clients of every dialect find their own: they ask at the same route."""
    openai, google = (msgspec.json.decode(models(names)) for models in (chat_completions.models, gemini.models))
    return msgspec.json.encode(openai | google)


_SERVICES: tuple[tuple[str, re.Pattern[str], Service], ...] = (
    ("POST", re.compile(r"chat/completions"), Generate(chat_completions)),
    ("POST", re.compile(r"responses"), Generate(responses)),
    ("POST", re.compile(r"responses/input_tokens"), Count(responses, responses.counted)),
    ("POST", re.compile(r"messages"), Generate(messages)),
    ("POST", re.compile(r"messages/count_tokens"), Count(messages, messages.counted)),
    ("POST", re.compile(r"(v1beta/)?models/.+:(generateContent|streamGenerateContent)"), Generate(gemini)),
    ("POST", re.compile(r"(v1beta/)?models/.+:countTokens"), Count(gemini, gemini.counted)),
    ("GET", re.compile(r"v1beta/models"), Models(gemini, listed)),
    ("GET", re.compile(r"models"), Models(chat_completions, listed)),
)
_SPEAKERS: tuple[tuple[re.Pattern[str], Dialect], ...] = (
    (re.compile(r"responses"), responses),
    (re.compile(r"messages|api/"), messages),
    (re.compile(r"v1beta(/|$)|models/.+:"), gemini),
)
"""Who answers where nothing is served, by the beginning of the route; Chat Completions elsewhere."""


def route_of(path: str) -> str:
    """What is asked for, however often a harness put `/v1` in front of it."""
    return _VERSION.sub("", path).strip("/")


def service_at(method: str, route: str) -> Service | None:
    for verb, pattern, service in _SERVICES:
        if verb == method and pattern.fullmatch(route):
            return service
    return None


def speaker_at(route: str) -> Dialect:
    """The dialect in which to refuse what is asked for at `route`."""
    for _, pattern, service in _SERVICES:
        if pattern.fullmatch(route):
            return service.dialect
    return next((dialect for pattern, dialect in _SPEAKERS if pattern.match(route)), chat_completions)
