"""When two messages, and two requests, are the same although a harness wrote them differently.

Promises: equal under key order, white space of JSON, renamed tool call ids, absent against null against empty,
text against one text part, and white space around an assistant's text; different in everything else.
Comparing a conversation with any number of recorded ones costs one pass over it.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from openforge.chat.contract import Message, Tool

_ENCODER = msgspec.json.Encoder(order="deterministic")


class Chain:
    """A running hash over the messages of one conversation: equal chains, equal conversations.

    `value` is over everything, `bare` leaves out reasoning, which some harnesses do not send back.
    """

    __slots__ = ("_ordinals", "bare", "value")

    def __init__(self) -> None:
        self.value = self.bare = b"\0" * 16
        self._ordinals: dict[str, int] = {}

    @classmethod
    def after(cls, messages: Sequence[Message], value: bytes, bare: bytes) -> "Chain":
        """The chain that had these values after these messages, without hashing them again."""
        chain = cls()
        chain.value, chain.bare = value, bare
        chain._ordinals = {call_id: ordinal for ordinal, call_id in enumerate(call_ids(messages))}
        return chain

    @property
    def calls(self) -> tuple[str, ...]:
        """The ids of the tool calls so far, in the order in which they appeared."""
        return tuple(self._ordinals)

    def copy(self) -> "Chain":
        twin = Chain()
        twin.value, twin.bare, twin._ordinals = self.value, self.bare, dict(self._ordinals)
        return twin

    def add(self, message: Message) -> None:
        key = self._key(message)
        same = self.value == self.bare and not message.reasoning
        self.bare = _hash(self.bare, key)
        self.value = self.bare if same else _hash(self.value, key, message.reasoning.strip().encode())

    def _key(self, message: Message) -> bytes:
        calls = [(self._ordinal(call.id), call.name, normal_arguments(call.arguments)) for call in message.tool_calls]
        answers = self._ordinal(message.tool_call_id) if message.tool_call_id else -1
        content = message.content.strip() if message.role == "assistant" else message.content
        if not message.images:
            return _ENCODER.encode((message.role, content, calls, answers))
        images = [(image.digest, image.at) for image in message.images]
        return _ENCODER.encode((message.role, content, calls, answers, images))

    def _ordinal(self, call_id: str) -> int:
        return self._ordinals.setdefault(call_id, len(self._ordinals))


def call_ids(messages: Sequence[Message]) -> tuple[str, ...]:
    """The ids of a conversation's tool calls in the order in which they appear."""
    found: dict[str, None] = {}
    for message in messages:
        found |= dict.fromkeys(call.id for call in message.tool_calls)
        if message.tool_call_id:
            found[message.tool_call_id] = None
    return tuple(found)


def chain_of(messages: Sequence[Message]) -> Chain:
    chain = Chain()
    for message in messages:
        chain.add(message)
    return chain


def answer_key(answer: Message) -> bytes:
    """The same for an assistant message and its echo, wherever they stand."""
    return chain_of([answer]).value


def normal_arguments(arguments: str) -> Any:
    """Arguments as a value, so that white space, escapes and key order do not count; text if it is no JSON."""
    try:
        return _plain(msgspec.json.decode(arguments)) if arguments else {}
    except (msgspec.DecodeError, RecursionError):
        return arguments


def _plain(value: Any) -> Any:
    """1.0 and 1 are one number to a harness written in JavaScript."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case dict():
            return {key: _plain(item) for key, item in value.items()}
        case list():
            return [_plain(item) for item in value]
    return value


def tools_digest(tools: Sequence[Tool]) -> bytes:
    """Names, descriptions, schemas and their order."""
    return _hash(_ENCODER.encode(tools)) if tools else b""


def retry_digest(attempt: str, dialect: str, thread: str, chain: Chain, tools: bytes, asked: bytes) -> str:
    """The same for a call and its repeats: `tools` is their digest, `asked` the canonical JSON of the sampling fields.

    Two attempts never share a digest, nor do two threads of one attempt where the harness names them.
    """
    head = _ENCODER.encode((attempt, dialect, thread))
    return _hash(head, chain.value, tools, asked).hex()


def _hash(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(4, "little"))
        digest.update(part)
    return digest.digest()
