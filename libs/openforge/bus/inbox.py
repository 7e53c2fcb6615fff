"""Where the answers to requests come: a queue that also wakes its reader when the connection was replaced."""

import asyncio
import time
from collections import deque
from contextlib import suppress

from nats.aio.msg import Msg


class Inbox:
    """Messages that come in answer to requests of ours, in order. One reader at a time.

    `next` gives None when the time is up or the connection was replaced: then ask again.
    """

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self._requests = 0
        self._queue: deque[tuple[float, Msg]] = deque()
        self._awake = asyncio.Event()
        self._stirred = False

    def fresh_reply(self) -> str:
        """Where the answers to the next request are to go; the status that ends it has this subject."""
        self._requests += 1
        return f"{self.subject}.{self._requests}"

    async def receive(self, message: Msg) -> None:
        self._queue.append((time.monotonic(), message))
        self._awake.set()

    def stir(self) -> None:
        """The connection was replaced: what was asked for may never come."""
        self._stirred = True
        self._awake.set()

    def take(self) -> tuple[float, Msg] | None:
        """The oldest message and when it arrived (monotonic seconds)."""
        return self._queue.popleft() if self._queue else None

    async def next(self, timeout_s: float) -> tuple[float, Msg] | None:
        if self._queue:
            return self._queue.popleft()
        if not self._stirred:
            self._awake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._awake.wait()
        self._stirred = False
        return self.take()


def status_of(message: Msg) -> str | None:
    """The status of an answer without a payload, as `404`; None for a real message."""
    if message.data or not message.headers or "Nats-Stream" in message.headers:
        return None  # stored messages that were got directly have their stream, a 503 may have a subject
    status: str | None = message.headers.get("Status")
    return status
