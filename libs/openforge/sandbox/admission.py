"""How many sandboxes are made at once, and who is next.

Promises: at most `at_once` are being made; of those who wait, the most urgent is next, then the oldest; who comes
when `waiting` already wait is told so at once, with a time after which to try again.
"""

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

URGENT, NORMAL, SPARE = 0, 10, 20
"""Priorities: smaller goes first. `SPARE` is for what nobody waits for yet."""


class Busy(Exception):
    """Too many wait already. `retry_after_s` is when to try again."""

    def __init__(self, text: str, retry_after_s: float) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class Admission:
    def __init__(self, *, at_once: int, waiting: int, retry_after_s: float = 5.0) -> None:
        self._free = at_once
        self._most_waiting = waiting
        self._retry_after_s = retry_after_s
        self._order = itertools.count()
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @asynccontextmanager
    async def turn(self, priority: int = NORMAL) -> AsyncIterator[None]:
        """Hold one place; raises `Busy`."""
        await self._take(priority)
        try:
            yield
        finally:
            self._give_back()

    def check(self) -> None:
        """Raises `Busy` where one more could not wait."""
        if self._free <= 0 and len(self._queue) >= self._most_waiting:
            raise Busy(f"{len(self._queue)} sandboxes wait to be made", self._retry_after_s)

    async def _take(self, priority: int) -> None:
        self.check()
        if self._free > 0:
            self._free -= 1
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (priority, next(self._order), mine))
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._give_back()  # it was ours already
            self._queue = [entry for entry in self._queue if entry[2] is not mine]
            heapq.heapify(self._queue)
            raise

    def _give_back(self) -> None:
        while self._queue:
            _, _, first = heapq.heappop(self._queue)
            if not first.done():
                first.set_result(None)
                return
        self._free += 1
