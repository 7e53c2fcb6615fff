"""One thread that does slow things one after another, and dies with the process.

Promises: calls run in the order in which they were asked for; a caller that goes away leaves its call running,
and nobody waits for it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class SlowThread:
    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[asyncio.Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._running = 0
        threading.Thread(target=self._work, name=name, daemon=True).start()

    @property
    def busy(self) -> bool:
        """Whether a call runs or waits, its caller gone or not."""
        return self._running > 0

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._running += 1
        self._calls.put((future, lambda: function(*args, **kwargs)))
        return await future

    def _work(self) -> None:
        while True:
            future, function = self._calls.get()
            try:
                outcome: Any = function()
                failed = None
            except BaseException as error:  # the boundary: it belongs to the caller
                outcome, failed = None, error
            try:
                future.get_loop().call_soon_threadsafe(self._settle, future, outcome, failed)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return

    def _settle(self, future: asyncio.Future[Any], outcome: Any, failed: BaseException | None) -> None:
        self._running -= 1
        if future.cancelled():
            return
        if failed is None:
            future.set_result(outcome)
        else:
            future.set_exception(failed)
