"""A reader's connection: what to read, of which runs, from when on."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypedDict, TypeVar, Unpack

import msgspec

from openforge.bus import Bus, BusClosed, BusSettings
from openforge.bus.streams import stream_of, subjects_of
from openforge.client import cursor
from openforge.client.reading import Moment, Reading
from openforge.protos import (
    BatchTrained,
    EngineMeasured,
    Fact,
    PolicyPublished,
    PolicyServed,
    TrajectoryRetired,
    TrajectoryVerified,
    TurnRecorded,
    env_token,
    token,
)

F = TypeVar("F", bound=Fact)
logger = logging.getLogger("openforge.client")
_LEAVE_S = 5.0

PolicyFact = BatchTrained | TrajectoryRetired | PolicyPublished | PolicyServed | EngineMeasured


class HowToRead(TypedDict, total=False):
    """`name` makes a reading resumable: it goes on where the last one of this name was, else `since` or `after` say
    where it begins, else it begins with the first fact. `since` is a date and time, a timedelta (ago) or Unix seconds;
    `after` a sequence of the stream. `until_now` ends it when everything that was told is read. `poll_s` is the longest
    pause between two looks for more, `save_s` how often a name's cursor is saved: 0 after every fact.
    """

    name: str
    since: Moment | None
    after: int | None
    until_now: bool
    poll_s: float
    save_s: float


class Client:
    """Reads and nothing else. Waits out breaks and restarts of the server."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._named: list[Reading[Any]] = []

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, url: str = "", *, settings: BusSettings | None = None, name: str = "client"
    ) -> "AsyncIterator[Client]":
        """`settings` default to the environment's; `url` replaces theirs. `name` is how the server lists us.

        Raises `NoServer` if none lets us in. At the end, the cursors of named readings are saved.
        """
        settings = settings or BusSettings.from_env()
        if url:
            settings = msgspec.structs.replace(settings, url=url)
        async with Bus.connect(settings, name=name) as bus:
            client = cls(bus)
            try:
                yield client
            finally:
                await client._leave()

    def trajectories(
        self, *, run: str = "*", env: str = "*", harness: str = "*", **how: Unpack[HowToRead]
    ) -> Reading[TrajectoryVerified]:
        """Verdicts with the tokens to train on. `env` is an environment's name, or the path of its `env.py`."""
        env = env if env == "*" else env_token(env)
        return self._reading("trajectory", _subjects(run, "trajectory", env, harness), how)

    def turns(
        self, *, run: str = "*", episode: str = "*", attempt: int | str = "*", **how: Unpack[HowToRead]
    ) -> Reading[TurnRecorded]:
        """Model calls, token for token."""
        return self._reading("turn", _subjects(run, "turn", episode, attempt), how)

    def batches(self, *, run: str = "*", **how: Unpack[HowToRead]) -> Reading[BatchTrained]:
        """Optimizer steps."""
        return self.facts(BatchTrained, run=run, **how)

    def policy(self, *, run: str = "*", **how: Unpack[HowToRead]) -> Reading[PolicyFact]:
        """What was trained, retired, published and served, in the order in which it was told."""
        return self._reading("policy", subjects_of("policy", run), how)

    def facts(self, fact: type[F], *key: str | int, run: str = "*", **how: Unpack[HowToRead]) -> Reading[F]:
        """Facts of one name whose key begins so."""
        return self._reading(fact.kind, fact.filter_for(run, *key), how)

    async def forget(self, name: str) -> None:
        """A reading of this name begins anew."""
        await cursor.forget(self._bus.link, name)

    async def _leave(self) -> None:
        """Save the cursors. What a server that is away cannot take comes again next time."""
        try:
            async with asyncio.timeout(_LEAVE_S):
                for reading in self._named:
                    await reading.save()
        except (TimeoutError, BusClosed) as error:
            logger.warning("cursor not saved", extra={"fields": {"why": repr(error)}})

    def _reading(self, kind: str, subjects: str, how: HowToRead) -> Reading[Any]:
        arguments = dict(how)
        name = arguments.pop("name", "")
        link, stream = self._bus.link, stream_of(kind)
        named = cursor.Cursor(link, str(name), stream, subjects) if name else None
        reading: Reading[Any] = Reading(link, self._bus.blobs, stream, subjects, cursor=named, **arguments)  # type: ignore[arg-type]
        if named is not None:
            self._named.append(reading)
        return reading


def _subjects(run: str, kind: str, *parts: str | int) -> str:
    names = [part if part == "*" else token("filter", part) for part in parts]
    return ".".join(["of", run if run == "*" else token("run", run), kind, *map(str, names), ">"])
