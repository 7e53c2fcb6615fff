"""The bus as services see it: facts told once, kept, worked on and followed."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar, cast

from openforge.blobs import Blobs, blobs_at
from openforge.bus import streams
from openforge.bus.bucket import Bucket
from openforge.bus.dead import Dead
from openforge.bus.follow import Follower
from openforge.bus.link import Link
from openforge.bus.lookup import all_on, is_on, last_on, subjects_on
from openforge.bus.object_store import ObjectStoreBlobs
from openforge.bus.receive import Place, payload_of, place_of, told_of
from openforge.bus.settings import BusSettings
from openforge.bus.snapshot import Snapshots
from openforge.bus.tell import IN_FLIGHT, Teller
from openforge.bus.told import CaughtUp, Cursors, Snapshot, Told
from openforge.bus.weight_objects import BusObjects
from openforge.bus.work import Handler, Job, OnDead, Worker
from openforge.protos import DeadLetter, Fact

F = TypeVar("F", bound=Fact)


class Bus:
    """One connection. Everything here waits out breaks and restarts of the server."""

    def __init__(self, link: Link, settings: BusSettings) -> None:
        self.settings = settings
        self.link = link
        self.blobs: Blobs = blobs_at(settings.blobs) if settings.blobs else ObjectStoreBlobs(link, streams.BLOB_STORE)
        self.weights = BusObjects(link)
        self._dead = Dead(link, self.blobs)
        self._teller = Teller(link, self.blobs)
        self._follower = Follower(link, self.blobs, self._dead)
        self._snapshots = Snapshots(link, self.blobs)

    @classmethod
    @asynccontextmanager
    async def connect(cls, settings: BusSettings, *, name: str) -> "AsyncIterator[Bus]":
        """Raises `NoServer` if none lets us in within `connect_timeout_s`."""
        link = await Link.open(settings, name)
        try:
            yield cls(link, settings)
        finally:
            await link.close()

    async def set_up(self) -> None:
        """Make the streams, buckets and stores, or change them to the settings. As often as you like."""
        await streams.set_up(self.link, self.settings.streams)

    # -- tell

    async def tell(self, fact: Fact) -> int:
        """Store a fact for ever and return its sequence; raises `AlreadyTold` where its key is taken."""
        return await self._teller.tell(fact)

    async def tell_all(self, facts: Iterable[Fact], *, in_flight: int = IN_FLIGHT) -> list[int]:
        """As `tell` for each, many in flight; what lies there with the same bytes is fine."""
        return await self._teller.tell_all(facts, in_flight)

    async def tell_again(self, told: Iterable[tuple[str, bytes]]) -> list[int]:
        """Store facts that were told elsewhere, each a subject and its bytes, which stay as they are."""
        return await self._teller.tell_again(told)

    # -- look

    async def as_told(self, kind: str, run: str) -> AsyncIterator[tuple[Place, bytes]]:
        """The bytes of every fact of this kind now, in the order of the stream, whatever version told them."""
        async for message in all_on(self.link, streams.stream_of(kind), streams.subjects_of(kind, run)):
            yield place_of(message), await payload_of(message, self.blobs)

    async def find(self, fact: type[F], run: str, *key: str | int) -> Told[F] | None:
        """The fact with this natural key."""
        message = await last_on(self.link, streams.stream_of(fact.kind), fact.subject_for(run, *key))
        if message is None:
            return None
        return cast("Told[F]", await told_of(message, place_of(message), self.blobs))

    async def is_told(self, fact: type[Fact], run: str, *key: str | int) -> bool:
        """Whether there is a fact with this natural key: cheaper than `find` where there is none."""
        return await is_on(self.link, streams.stream_of(fact.kind), fact.subject_for(run, *key))

    async def read(self, fact: type[F], run: str, *key: str | int) -> list[Told[F]]:
        """All facts of this name now whose key begins so, in the order of the stream."""
        stream, subjects = streams.stream_of(fact.kind), fact.filter_for(run, *key)
        expected = len(await subjects_on(self.link, stream, subjects))
        if not expected:
            return []
        while True:
            messages = [message async for message in all_on(self.link, stream, subjects)]
            if len(messages) >= expected:
                break
            await asyncio.sleep(0.05)  # a replica answered that is behind its leader
            expected = len(await subjects_on(self.link, stream, subjects))
        tolds = [await told_of(message, place_of(message), self.blobs) for message in messages]
        return cast("list[Told[F]]", tolds)

    async def count(self, fact: type[Fact], run: str, *key: str | int) -> int:
        """How many facts of this name have a key that begins so."""
        return len(await subjects_on(self.link, streams.stream_of(fact.kind), fact.filter_for(run, *key)))

    # -- follow, work

    def follow(
        self, kinds: Sequence[str], *, run: str = "*", cursors: Cursors = Cursors(), until_now: bool = False
    ) -> AsyncGenerator[Told[Fact] | CaughtUp, None]:
        """Facts in order, from the cursors on, for a folder; see `follow.py`."""
        return self._follower.follow(kinds, run, cursors, until_now)

    async def work(
        self,
        *,
        service: str,
        fact: type[F],
        handler: Handler,
        run: str = "*",
        in_flight: int = 8,
        ack_wait_s: float = 30.0,
        attempts: int = 5,
        retry_s: float = 1.0,
        on_dead: OnDead | None = None,
    ) -> None:
        """Handle every fact of this name, `in_flight` at once, until cancelled; see `work.py`.

        A failed handler is tried again after `retry_s`, twice that, and so on.
        """
        job = Job(
            service=service,
            fact=fact,
            handler=handler,
            on_dead=on_dead,
            run=run,
            ack_wait_s=ack_wait_s,
            attempts=attempts,
            retry_s=retry_s,
        )
        consumer = job.consumer(self.link)
        await consumer.ensure()
        async with asyncio.TaskGroup() as group:
            for _ in range(in_flight):
                worker = Worker(job, consumer, self.link, self._teller, self.blobs, self._dead)
                group.create_task(worker.serve())

    async def dead_letters(self, service: str = "*") -> list[DeadLetter]:
        return await self._dead.letters(service)

    # -- remember

    async def remember(self, name: str, snapshot: Snapshot) -> None:
        await self._snapshots.remember(name, snapshot)

    async def recall(self, name: str) -> Snapshot | None:
        return await self._snapshots.recall(name)

    async def bucket(self, name: str) -> Bucket:
        """A key-value bucket, made if need be."""
        await streams.ensure_bucket(self.link, name, self.settings.streams)
        return Bucket(self.link, name)
