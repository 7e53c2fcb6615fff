"""Conversations to ids, with every answer that was sampled here as it was sampled.

Promises: text that comes back as it was told is never tokenised again, wherever in the conversation it stands; what
somebody else wrote is rendered as the template has it.
"""

from collections.abc import Callable, Sequence

from openforge.chat.contract import Message, Renderer, Tool
from openforge.protos import pack_ids


def view(ids: bytes) -> "memoryview[int]":
    """Packed ids as a sequence of numbers, not copied (little-endian machines only, as torch is)."""
    return memoryview(ids).cast("i")


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
