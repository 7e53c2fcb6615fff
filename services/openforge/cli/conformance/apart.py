"""Work that cannot be called off, such as a forward pass, beside an event loop that stays free."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class Interrupted(Exception):
    """Somebody asked to stop."""


async def unless_stopped(work: Callable[[], T], stopped: asyncio.Event) -> T:
    """What `work` returns. Raises `Interrupted` as soon as `stopped` is set; the thread that works is then left to
    itself and holds up no end of a loop, only the process's own."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # nobody who no longer waits makes it fail

    def run() -> None:
        try:
            outcome.set_result(work())
        except Exception as error:  # the boundary of the thread: whoever waits is told
            outcome.set_exception(error)

    if stopped.is_set():
        raise Interrupted
    threading.Thread(target=run, name="apart", daemon=True).start()
    done, stopping = asyncio.wrap_future(outcome), asyncio.create_task(stopped.wait())
    either: set[asyncio.Future[Any]] = {done, stopping}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise Interrupted
        return done.result()
    finally:
        for waiting in either:
            waiting.cancel()
        with suppress(asyncio.CancelledError):
            await stopping
