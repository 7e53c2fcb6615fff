"""Folders: they read facts in order from where they were, and never take anything away.

Promises: each fact of the kinds once, in the order of its stream, whatever breaks; what existed at the start
comes in the order of time over all kinds, then `CAUGHT_UP` once, then what is new as it comes. A message that is no
fact is told dead once and passed over.
"""

import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from nats.aio.msg import Msg

from openforge.blobs import Blobs
from openforge.bus.consumer import SILENCE_S, Consumer
from openforge.bus.dead import Dead
from openforge.bus.errors import Undecodable, UnknownFact
from openforge.bus.inbox import Inbox, status_of
from openforge.bus.link import Link
from openforge.bus.receive import Place, place_of, told_of
from openforge.bus.streams import stream_of, subjects_of
from openforge.bus.told import CAUGHT_UP, CaughtUp, Cursors, Told
from openforge.protos import Fact, token

logger = logging.getLogger("openforge.bus")

BATCH = 256
_BATCH_BYTES = 16 << 20
_INACTIVE_S = 60
_NS = 1_000_000_000


class _Lane:
    """One kind, read by a consumer that may vanish at any time and is made again at the right place."""

    def __init__(self, link: Link, kind: str, run: str, after: int) -> None:
        self.kind = kind
        self.stream = stream_of(kind)
        self.held: deque[tuple[Msg, Place]] = deque()
        self.caught_up = False
        self._link = link
        self._subjects = subjects_of(kind, run)
        self._read = after
        self._consumer: Consumer | None = None
        self._consumer_sequence = 0
        self._epoch = -1
        self._request = ""
        self._open = 0
        self._existing = -1
        self._heard_at = 0.0

    async def keep_reading(self, inbox: Inbox) -> None:
        """See to it that a request for more is open, unless enough is held."""
        if self._epoch != self._link.epoch:
            self._consumer = None
        if self._consumer is None:
            await self._begin()
        if self._open == 0 and len(self.held) < BATCH and self._consumer is not None:
            self._request = await self._consumer.pull(
                inbox, BATCH, max(_BATCH_BYTES, 2 * self._link.client.max_payload)
            )
            self._open = BATCH
            self._heard_at = time.monotonic()

    async def _begin(self) -> None:
        self._epoch = self._link.epoch
        name = f"folder-{self._link.nonce}-{self._link.client._nuid.next().decode()}"
        config = {
            "filter_subject": self._subjects,
            "ack_policy": "none",
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._read + 1,
            "inactive_threshold": _INACTIVE_S * _NS,
            "mem_storage": True,
            "num_replicas": 1,
        }
        self._consumer = Consumer(self._link, self.stream, name, config)
        self._consumer_sequence = 0
        self._open = 0
        waiting = await self._consumer.make()
        if self._existing < 0:
            self._existing = waiting
        if self._existing == 0 or waiting == 0:
            self.caught_up = True

    def accept(self, message: Msg, place: Place) -> None:
        """Take a message that was delivered; one out of order means that some were lost on the way."""
        if self._consumer is None or f".{self._consumer.name}." not in message.reply:
            return
        self._heard_at = time.monotonic()
        if place.consumer_sequence != self._consumer_sequence + 1:
            self._consumer = None
            return
        self._consumer_sequence += 1
        self._open = max(0, self._open - 1)
        self._read = place.sequence
        self._existing = max(0, self._existing - 1)
        self.held.append((message, place))
        if self._existing == 0 or place.pending == 0:
            self.caught_up = True

    def ended(self, request: str, status: str) -> None:
        """A request was ended by the server."""
        if request != self._request:
            return
        self._heard_at = time.monotonic()
        if status == "100":
            return
        self._open = 0
        if status not in ("404", "408") and not status.startswith("409 Message Size"):
            self._consumer = None

    def doubt(self) -> None:
        """A consumer that owes us heartbeats and is silent is gone, whatever the server forgot to say."""
        if self._open and time.monotonic() - self._heard_at > SILENCE_S:
            self._consumer = None

    async def end(self) -> None:
        if self._consumer is not None and not self._link.client.is_closed and self._link.client.is_connected:
            await self._link.tell_server(
                f"$JS.API.CONSUMER.DELETE.{self.stream}.{self._consumer.name}", {}, self._link.client.new_inbox()
            )


class Follower:
    def __init__(self, link: Link, blobs: Blobs, dead: Dead) -> None:
        self._link = link
        self._blobs = blobs
        self._dead = dead
        self._unknown: set[str] = set()

    async def follow(
        self, kinds: Sequence[str], run: str, cursors: Cursors, until_now: bool
    ) -> AsyncGenerator[Told[Fact] | CaughtUp, None]:
        if run != "*":
            token("run", run)
        lanes = [_Lane(self._link, kind, run, cursors[kind]) for kind in dict.fromkeys(kinds)]
        async with self._link.inbox() as inbox:
            try:
                async for message, place in self._existing(lanes, inbox):
                    if (told := await self._told(message, place)) is not None:
                        yield told
                yield CAUGHT_UP
                if until_now:
                    return
                async for message, place in self._new(lanes, inbox):
                    if (told := await self._told(message, place)) is not None:
                        yield told
            finally:
                for lane in lanes:
                    await lane.end()

    async def _existing(self, lanes: list[_Lane], inbox: Inbox) -> AsyncIterator[tuple[Msg, Place]]:
        """The oldest head of all lanes, as soon as every lane has one or has no more."""
        for lane in lanes:
            await lane.keep_reading(inbox)
        while True:
            while all(lane.held or lane.caught_up for lane in lanes):
                full = [lane for lane in lanes if lane.held]
                if not full:
                    return
                yield min(full, key=lambda lane: lane.held[0][1].at).held.popleft()
            await self._receive(lanes, inbox)

    async def _new(self, lanes: list[_Lane], inbox: Inbox) -> AsyncIterator[tuple[Msg, Place]]:
        while True:
            await self._receive(lanes, inbox)
            for lane in lanes:
                while lane.held:
                    yield lane.held.popleft()

    async def _receive(self, lanes: list[_Lane], inbox: Inbox) -> None:
        """Wait for something to come, and give everything that came to its lane."""
        await self._link.up()
        for lane in lanes:
            await lane.keep_reading(inbox)
        arrived = await inbox.next(SILENCE_S)
        while arrived is not None:
            self._sort(lanes, arrived[1])
            arrived = inbox.take()
        for lane in lanes:
            lane.doubt()

    def _sort(self, lanes: list[_Lane], message: Msg) -> None:
        if (status := status_of(message)) is not None:
            description = (message.headers or {}).get("Description", "")
            for lane in lanes:
                lane.ended(message.subject, f"{status} {description}" if status == "409" else status)
            return
        place = place_of(message)
        for lane in lanes:
            if lane.stream == place.stream:
                lane.accept(message, place)

    async def _told(self, message: Msg, place: Place) -> Told[Fact] | None:
        try:
            return await told_of(message, place, self._blobs)
        except UnknownFact as error:
            if str(error) not in self._unknown:
                self._unknown.add(str(error))
                logger.warning("fact passed over", extra={"fields": {"subject": place.subject, "why": str(error)}})
        except Undecodable as error:
            await self._dead.bury(self._link.name, message, place, "undecodable", error)
        return None
