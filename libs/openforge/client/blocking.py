"""The same client for programs without an event loop.

Promises: everything of `Client` and `Reading`, with `for` in place of `async for`; Ctrl-C ends a wait at once.
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar, Unpack

from openforge.bus import BusSettings, Told
from openforge.client.client import Client, HowToRead, PolicyFact
from openforge.client.reading import Reading
from openforge.protos import BatchTrained, Fact, TrajectoryVerified, TurnRecorded

F = TypeVar("F", bound=Fact, covariant=True)
G = TypeVar("G", bound=Fact)
T = TypeVar("T")


class _Loop:
    """An event loop in a thread of its own, so that the connection lives while the caller computes."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="openforge-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class BlockingReading(Generic[F]):
    def __init__(self, reading: Reading[F], loop: _Loop) -> None:
        self._reading = reading
        self._loop = loop

    def __iter__(self) -> Iterator[Told[F]]:
        return self

    def __next__(self) -> Told[F]:
        told = self._loop.run(self._next())
        if told is None:
            raise StopIteration
        return told

    def done(self) -> None:
        """The fact at hand is done too: for before a `break`."""
        self._loop.run(self._reading.done())

    async def _next(self) -> Told[F] | None:
        return await anext(self._reading, None)


class BlockingClient:
    def __init__(self, client: Client, loop: _Loop) -> None:
        self._client = client
        self._loop = loop

    @classmethod
    @contextmanager
    def connect(
        cls, url: str = "", *, settings: BusSettings | None = None, name: str = "client"
    ) -> "Iterator[BlockingClient]":
        """As `Client.connect`."""
        loop = _Loop()
        try:
            connection = Client.connect(url, settings=settings, name=name)
            client = loop.run(connection.__aenter__())
            try:
                yield cls(client, loop)
            finally:
                loop.run(connection.__aexit__(None, None, None))
        finally:
            loop.end()

    def trajectories(
        self, *, run: str = "*", env: str = "*", harness: str = "*", **how: Unpack[HowToRead]
    ) -> BlockingReading[TrajectoryVerified]:
        return BlockingReading(self._client.trajectories(run=run, env=env, harness=harness, **how), self._loop)

    def turns(
        self, *, run: str = "*", episode: str = "*", attempt: int | str = "*", **how: Unpack[HowToRead]
    ) -> BlockingReading[TurnRecorded]:
        return BlockingReading(self._client.turns(run=run, episode=episode, attempt=attempt, **how), self._loop)

    def batches(self, *, run: str = "*", **how: Unpack[HowToRead]) -> BlockingReading[BatchTrained]:
        return BlockingReading(self._client.batches(run=run, **how), self._loop)

    def policy(self, *, run: str = "*", **how: Unpack[HowToRead]) -> BlockingReading[PolicyFact]:
        return BlockingReading(self._client.policy(run=run, **how), self._loop)

    def facts(self, fact: type[G], *key: str | int, run: str = "*", **how: Unpack[HowToRead]) -> BlockingReading[G]:
        return BlockingReading(self._client.facts(fact, *key, run=run, **how), self._loop)

    def forget(self, name: str) -> None:
        self._loop.run(self._client.forget(name))
