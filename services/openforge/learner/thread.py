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
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
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
                future.get_loop().call_soon_threadsafe(_settle, future, outcome, failed)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return


def _settle(future: asyncio.Future[Any], outcome: Any, failed: BaseException | None) -> None:
    if future.cancelled():
        return
    if failed is None:
        future.set_result(outcome)
    else:
        future.set_exception(failed)
