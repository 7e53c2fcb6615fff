"""Conversations to ids, with every answer that was sampled here as it was sampled.

Promises: text that comes back as it was told is never tokenised again, wherever in the conversation it stands; what
somebody else wrote is rendered as the template has it; ids are written for the engine once, not again in each turn.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from openforge.chat.contract import Message, Renderer, Tool
from openforge.protos import pack_ids


def view(ids: bytes) -> "memoryview[int]":
    """Packed ids as a sequence of numbers, not copied (little-endian machines only, as torch is)."""
    return memoryview(ids).cast("i")


def written(ids: bytes) -> bytes:
    """Packed ids as a JSON list."""
    return msgspec.json.encode(view(ids).tolist())


def joined(one: bytes, other: bytes) -> bytes:
    """Two JSON lists as one."""
    if len(one) <= len(_EMPTY) or len(other) <= len(_EMPTY):
        return one if len(one) > len(_EMPTY) else other
    return b"%b,%b" % (one[:-1], other[1:])


_EMPTY = b"[]"


class Written:
    """Ids of turns as JSON, of the newest few that a call may go on from."""

    MOST = 8

    def __init__(self) -> None:
        self._kept: OrderedDict[int, bytes] = OrderedDict()

    def keep(self, turn: int, text: bytes) -> None:
        self._kept[turn] = text
        if len(self._kept) > self.MOST:
            self._kept.popitem(last=False)

    def of(self, turn: int) -> bytes | None:
        return self._kept.get(turn)

    def forget(self, turn: int) -> None:
        self._kept.pop(turn, None)


class Script:
    """`sampled` gives the packed ids of an assistant message that was sampled here, None for every other."""

    def __init__(self, renderer: Renderer, sampled: Callable[[Message], bytes | None]) -> None:
        self._renderer = renderer
        self._sampled = sampled

    def extend(self, ids: bytes, messages: Sequence[Message], tools: Sequence[Tool]) -> bytes | None:
        """A recorded prompt and answer, `messages` after them; None where the template cannot be continued so."""
        start = 0
        for at, message in enumerate(messages):
            answer = self._sampled(message) if message.role == "assistant" else None
            if answer is not None:
                bridge = self._renderer.bridge(view(ids), messages[start:at], tools)
                if bridge is None:
                    return None
                ids += pack_ids(bridge) + answer
                start = at + 1
        bridge = self._renderer.bridge(view(ids), messages[start:], tools)
        return None if bridge is None else ids + pack_ids(bridge)

    def write(self, messages: Sequence[Message], tools: Sequence[Tool]) -> bytes:
        """A conversation from its beginning."""
        for at, message in enumerate(messages):
            answer = self._sampled(message) if at and message.role == "assistant" else None
            if answer is not None:
                head = pack_ids(self._renderer.render(messages[:at], tools))
                whole = self.extend(head + answer, messages[at + 1 :], tools)
                if whole is not None:
                    return whole
                break
        return pack_ids(self._renderer.render(messages, tools))
