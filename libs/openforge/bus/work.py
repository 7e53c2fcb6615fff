"""Workers: each message is handled by one of them, to its end, however often that must be tried.

Promises: what a handler yields is told before its next line runs; a message is acknowledged after
the handler's end and never before; heartbeats keep it while the handler works; what fails too often, or cannot
be read, goes to the dead letters with its reason; a worker that is cancelled gives back what it holds.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, cast

import msgspec
import nats.errors
from nats.aio.msg import Msg

from openforge.blobs import Blobs
from openforge.bus import tracing
from openforge.bus.consumer import SILENCE_S, Consumer
from openforge.bus.dead import Dead
from openforge.bus.errors import AlreadyTold, BusClosed, Undecodable, Zombie
from openforge.bus.inbox import Inbox, status_of
from openforge.bus.link import Link, Lost, NoStream
from openforge.bus.receive import Place, place_of, told_of
from openforge.bus.streams import stream_of
from openforge.bus.tell import Teller
from openforge.bus.told import Told
from openforge.protos import Fact, token

logger = logging.getLogger("openforge.bus")

Handler = Callable[[Told[Any]], AsyncIterator[Fact]]
OnDead = Callable[[Told[Any], Exception], AsyncIterator[Fact]]
_NS = 1_000_000_000


class TooManyDeliveries(Exception):
    """The message was delivered too often without an end: whoever handles it dies."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker works on, and how patiently."""

    service: str
    fact: type[Fact]
    handler: Handler
    on_dead: OnDead | None
    run: str
    ack_wait_s: float
    attempts: int
    retry_s: float

    def consumer(self, link: Link) -> Consumer:
        name = consumer_name(self.service, self.fact, self.run)
        return Consumer(
            link,
            stream_of(self.fact.kind),
            name,
            {
                "durable_name": name,
                "filter_subject": self.fact.filter_for(self.run),
                "ack_policy": "explicit",
                "ack_wait": int(self.ack_wait_s * _NS),
                "deliver_policy": "all",
                "max_deliver": -1,
                "max_ack_pending": -1,
                "max_waiting": 4096,
            },
        )

    def pause_s(self, deliveries: int) -> float:
        return float(min(self.retry_s * 2 ** (deliveries - 1), 60.0))


def consumer_name(service: str, fact: type[Fact], run: str = "*") -> str:
    """What the server calls the consumer that all workers of a service on this fact share."""
    name = f"{token('service', service)}-{fact.__name__}"
    return name if run == "*" else f"{name}-{token('run', run)}"


class Worker:
    """One of the `in_flight` that take from the same consumer: one message at a time."""

    def __init__(self, job: Job, consumer: Consumer, link: Link, teller: Teller, blobs: Blobs, dead: Dead) -> None:
        self._job = job
        self._consumer = consumer
        self._link = link
        self._teller = teller
        self._blobs = blobs
        self._dead = dead

    async def serve(self) -> None:
        async with self._link.inbox() as inbox:
            try:
                while True:
                    await self._handle(await self._next(inbox))
                    _end_if_cancelled()
            finally:
                await self._give_back(inbox)

    # -- take

    async def _next(self, inbox: Inbox) -> Msg:
        while True:
            await self._link.up()
            await self._consumer.ensure()
            request = await self._consumer.pull(inbox, batch=1)
            while (arrived := await inbox.next(SILENCE_S)) is not None:
                at, message = arrived
                status = status_of(message)
                if status is None:
                    if time.monotonic() - at < self._job.ack_wait_s / 3:
                        return message
                    # else it lay here while the message before it was handled: the server gives it again
                elif status == "100" or message.subject != request:
                    pass  # still there, or an answer to an earlier request
                elif status in ("404", "408"):
                    break
                else:
                    self._consumer.forget()
                    await asyncio.sleep(0.1)
                    break

    async def _give_back(self, inbox: Inbox) -> None:
        while (arrived := inbox.take()) is not None:
            if status_of(arrived[1]) is None:
                await _say(arrived[1].nak)

    # -- handle

    async def _handle(self, message: Msg) -> None:
        place = place_of(message)
        try:
            told = await told_of(message, place, self._blobs)
        except Undecodable as error:
            await self._dead.bury(self._job.service, message, place, "undecodable", error)
            await _say(message.term)
            return
        if place.deliveries > self._job.attempts:
            tried = TooManyDeliveries(f"delivered {place.deliveries} times without an end")
            await self._die(message, place, told, tried)
            return
        with tracing.continued(f"{self._job.service} {self._job.fact.__name__}", message.headers, told.fact):
            async with self._kept(message):
                await self._try(message, place, told)

    async def _try(self, message: Msg, place: Place, told: Told[Fact]) -> None:
        try:
            await self._tell_yielded(self._job.handler(told))
        except asyncio.CancelledError:
            await _say(message.nak)
            raise
        except (BusClosed, Zombie):
            raise
        except Exception as error:  # the boundary: a handler's bug is its message's affair, not the worker's
            if place.deliveries >= self._job.attempts:
                await self._die(message, place, told, error)
            else:
                await self._again(message, place, error)
        else:
            await self._done(message)

    async def _tell_yielded(self, facts: AsyncIterator[Fact]) -> None:
        async with aclosing(cast("AsyncGenerator[Fact, None]", facts)) as yielded:
            async for fact in yielded:
                with suppress(AlreadyTold):  # the first telling wins
                    await self._teller.tell(fact)

    async def _done(self, message: Msg) -> None:
        """An acknowledgement that gets lost costs a second delivery, so wait until the server has it."""
        with suppress(Lost, NoStream):
            await (await self._link.send(message.reply, b"+ACK", None))

    async def _again(self, message: Msg, place: Place, error: Exception) -> None:
        pause_s = self._job.pause_s(place.deliveries)
        fields = {"service": self._job.service, "subject": place.subject, "deliveries": place.deliveries}
        logger.warning("handler failed", exc_info=error, extra={"fields": {**fields, "again_in_s": pause_s}})
        await _say(lambda: message.nak(delay=pause_s))

    async def _die(self, message: Msg, place: Place, told: Told[Fact], error: Exception) -> None:
        async with self._kept(message):
            reason = "too many deliveries" if isinstance(error, TooManyDeliveries) else "handler failed"
            await self._dead.bury(self._job.service, message, place, reason, error)
            try:
                if self._job.on_dead is not None:
                    await self._tell_yielded(self._job.on_dead(told, error))
            except (BusClosed, Zombie):
                raise
            except Exception as failed:  # the boundary again: nobody else would hear of it
                await self._again(message, place, failed)
            else:
                await _say(message.term)

    @asynccontextmanager
    async def _kept(self, message: Msg) -> AsyncIterator[None]:
        """The server does not give the message to anybody else meanwhile."""
        beating = asyncio.create_task(self._beat(message))
        try:
            yield
        finally:
            beating.cancel()

    async def _beat(self, message: Msg) -> None:
        while True:
            await asyncio.sleep(self._job.ack_wait_s / 3)
            await _say(message.in_progress)


def _end_if_cancelled() -> None:
    """A handler may have swallowed the one cancellation we get, as Python 3.11's `wait_for` now and then does."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def _say(word: Callable[[], Any]) -> None:
    """Tell the server about a message. If it does not hear, it delivers the message again."""
    with suppress(nats.errors.Error, OSError):
        await word()
