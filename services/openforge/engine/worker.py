"""The one thread that computes, and what the event loop asks of it.

Promises: everything that is asked happens between two steps, in the order of asking; the event loop never waits for a
computation; if the thread dies of an error, `died` says so and every open call ends.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch

from openforge.engine.batching import Batch, Limits, Served
from openforge.engine.request import Request
from openforge.service import log

R = TypeVar("R")
PauseMode = Literal["keep", "abort", "wait"]


class Call:
    """One request as the event loop sees it: `count` tokens of it can be read, `ended` when all can."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.count = 0
        self.ended = False
        self._news = asyncio.Event()

    async def more(self) -> None:
        """Wait until there is something new."""
        await self._news.wait()
        self._news.clear()

    def tell(self, count: int, ended: bool) -> None:
        self.count = count
        self.ended = ended
        self._news.set()


class WorkerDied(RuntimeError):
    """The computing thread ended with an error; its traceback is in the log."""


class Worker:
    """Owns the batch. Everything but `run` and the calls' own methods is for the event loop alone."""

    def __init__(self, served: Served, limits: Limits, *, threads: int) -> None:
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._threads = threads
        self._batch = Batch(served, limits)
        self._calls: dict[Request, Call] = {}
        self._asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._paused: PauseMode | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # Asked by the event loop

    async def ask(self, what: Callable[[Batch], R]) -> R:
        """Do something with the batch between two steps."""
        done: asyncio.Future[R] = self._loop.create_future()

        def do() -> None:
            try:
                result = what(self._batch)
            except Exception as error:  # handed to who asked
                self._later(_fail, done, error)
            else:
                self._later(_resolve, done, result)

        self._asked.put(do)
        return await done

    def submit(self, request: Request) -> Call:
        call = Call(request)

        def begin() -> None:
            self._calls[request] = call
            self._batch.add(request)

        if self.died.done():
            raise WorkerDied("the engine's computing thread has ended")
        self._asked.put(begin)
        return call

    async def abort(self, wanted: Callable[[Request], bool]) -> int:
        return await self.ask(lambda batch: self._abort(batch, wanted))

    def let_go(self, call: Call) -> None:
        """Nobody waits for the call any more."""
        self._asked.put(lambda: self._abort_one(call.request))

    async def pause(self, mode: PauseMode) -> None:
        """Returns when no step is computed any more: at once, or with `wait` when all that runs has ended."""

        def begin(batch: Batch) -> None:
            self._paused = mode
            if mode == "abort":
                self._abort(batch, lambda request: True)

        await self.ask(begin)
        while mode == "wait" and self._paused == "wait" and await self.ask(lambda batch: batch.running > 0):
            await asyncio.sleep(0.01)

    async def resume(self) -> None:
        def go_on(batch: Batch) -> None:
            self._paused = None

        await self.ask(go_on)

    @property
    def is_paused(self) -> bool:
        return self._paused is not None

    @property
    def batch(self) -> Batch:
        """For reading numbers; they may be a step old."""
        return self._batch

    async def stop(self) -> None:
        self._stopping = True
        self._asked.put(lambda: None)
        await asyncio.to_thread(self._thread.join)

    # The thread

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._do_what_is_asked()
                    self._step()
        except Exception as error:  # the boundary of the thread: a bug here ends the service
            log.error("the computing thread died", error=error)
            self._later(self._die)

    def _do_what_is_asked(self) -> None:
        if self._is_idle():
            self._asked.get()()
        while not self._asked.empty():
            self._asked.get()()

    def _is_idle(self) -> bool:
        batch = self._batch
        if self._paused == "wait":
            return batch.running == 0
        return self._paused is not None or batch.running + batch.waiting == 0

    def _step(self) -> None:
        if self._stopping or self._is_idle():
            return
        advanced = self._batch.step(admit=self._paused is None)
        self._tell(advanced)

    def _tell(self, requests: list[Request]) -> None:
        news: list[tuple[Call, int, bool]] = []
        for request in requests:
            ended = request.ended is not None
            call = self._calls.pop(request, None) if ended else self._calls.get(request)
            if call is not None:
                news.append((call, len(request.sampled), ended))
        if news:
            self._later(_tell_all, news)

    def _abort(self, batch: Batch, wanted: Callable[[Request], bool]) -> int:
        gone = batch.abort(wanted)
        self._tell(gone)
        return len(gone)

    def _abort_one(self, request: Request) -> None:
        if request in self._calls:
            self._abort(self._batch, lambda other: other is request)

    def _later(self, what: Callable[..., None], *args: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(what, *args)

    def _die(self) -> None:
        error = WorkerDied("the engine's computing thread has ended")
        if not self.died.done():
            self.died.set_exception(error)
            self.died.exception()  # whoever waits for it still gets it; nobody has to
        for call in self._calls.values():
            call.tell(call.count, True)


def _tell_all(news: list[tuple[Call, int, bool]]) -> None:
    for call, count, ended in news:
        call.tell(count, ended)


def _resolve(done: asyncio.Future[R], result: R) -> None:
    if not done.done():
        done.set_result(result)


def _fail(done: asyncio.Future[Any], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)
