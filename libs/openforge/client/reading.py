"""Reading facts one after the other, from where one was.

Promises: every fact on the subjects that lies at or after the start, in the order of its stream, each once, whatever
breaks meanwhile. A named reading that is begun again goes on after the last fact that was done: a fact is done when the
next one is asked for, or by `done`. What was done within the last `save_s` before a kill comes again, on the same
subject.
"""

import logging
import time
from collections import deque
from datetime import UTC, datetime, timedelta
from typing import Generic, TypeVar, cast

from nats.aio.msg import Msg

from openforge.blobs import Blobs
from openforge.bus import BusError, Told, Undecodable
from openforge.bus.link import Backoff, Link
from openforge.bus.lookup import page, sequence_of
from openforge.bus.receive import place_of, told_of
from openforge.client.cursor import Cursor
from openforge.protos import Fact

F = TypeVar("F", bound=Fact, covariant=True)
Moment = datetime | timedelta | float
"""A date and time, so long ago, or Unix seconds."""

logger = logging.getLogger("openforge.client")


class Reading(Generic[F]):
    """An endless iterator, or with `until_now` one that ends when everything that was told is read.

    Nothing is held between two facts: a reading may be left at any time and be gone on with later.
    """

    def __init__(
        self,
        link: Link,
        blobs: Blobs,
        stream: str,
        subjects: str,
        *,
        since: Moment | None = None,
        after: int | None = None,
        cursor: Cursor | None = None,
        until_now: bool = False,
        poll_s: float = 0.5,
        save_s: float = 1.0,
    ) -> None:
        if since is not None and after is not None:
            raise ValueError(f"since = {since!r} and after = {after!r}: say one of the two, they are two ways to begin")
        self.subjects = subjects
        self.passed_over = 0
        self._link = link
        self._blobs = blobs
        self._stream = stream
        self._start: dict[str, int | str] = (
            {"seq": (after or 0) + 1} if since is None else {"start_time": _rfc3339(since)}
        )
        self._cursor = cursor
        self._until_now = until_now
        self._poll_s = poll_s
        self._save_s = save_s
        self._begun = False
        self._held: deque[Msg] = deque()
        self._more = True
        self._given = 0
        self._done = 0
        self._saved_at = 0.0

    def __aiter__(self) -> "Reading[F]":
        return self

    async def __anext__(self) -> Told[F]:
        await self._begin()
        self._done = self._given
        if time.monotonic() - self._saved_at >= self._save_s:
            await self.save()
        while True:
            while self._held:
                if (told := await self._told(self._held[0])) is not None:
                    return told
            await self._fill()

    async def done(self) -> None:
        """The fact at hand is done too: for before a `break`."""
        self._done = self._given
        await self.save()

    async def save(self) -> None:
        """Remember what is done, if the reading has a name. Happens by itself.

        Raises `NameTaken` or `Denied`, once: from then on the reading has no name.
        """
        if self._cursor is not None and self._done > self._cursor.saved:
            try:
                await self._cursor.save(self._done)
            except BusError:
                self._cursor = None
                raise
        self._saved_at = time.monotonic()

    async def _begin(self) -> None:
        """Where a name was before it goes on, whatever `since` and `after` say."""
        if self._begun:
            return
        if self._cursor is not None and (sequence := await self._cursor.recall()) is not None:
            self._start = {"seq": sequence + 1}
            self._given = self._done = sequence
        self._saved_at = time.monotonic()
        self._begun = True

    async def _fill(self) -> None:
        """Wait for more; raises `StopAsyncIteration` where none is to be waited for."""
        backoff = Backoff(last_s=self._poll_s)
        while not self._held:
            if not self._more:
                await self.save()
                if self._until_now:
                    self._more = True
                    raise StopAsyncIteration
                await backoff.pause()
            messages, self._more = await page(self._link, self._stream, self.subjects, self._start)
            if messages:
                self._held.extend(messages)
                self._start = {"seq": sequence_of(messages[-1]) + 1}

    async def _told(self, message: Msg) -> Told[F] | None:
        """The message as a fact; None, once said why, where it is none that this version knows."""
        place = place_of(message)
        try:
            told = await told_of(message, place, self._blobs)
        except Undecodable as error:
            self.passed_over += 1
            logger.warning("passed over", extra={"fields": {"subject": place.subject, "why": str(error)}})
            told = None
        self._held.popleft()
        self._given = place.sequence
        return cast("Told[F] | None", told)


def _rfc3339(moment: Moment) -> str:
    match moment:
        case timedelta():
            at = datetime.now(UTC) - moment
        case datetime():
            at = moment.astimezone(UTC)
        case _:
            at = datetime.fromtimestamp(moment, UTC)
    return at.isoformat().replace("+00:00", "Z")
