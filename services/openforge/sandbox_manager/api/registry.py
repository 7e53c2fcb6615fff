"""Which replica has which sandbox.

Promises: an id is claimed by one replica only, also when two try at once; what a replica that is silent for too
long had is forgotten by whoever looks next, and its sandboxes are gone with it.
"""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

import msgspec
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError, NoKeysError

from openforge.bus import Bus
from openforge.bus.bucket import Bucket

_BOXES, _REPLICAS = "of_sandboxes", "of_sandbox_replicas"
_BEAT_S, _SILENT_S = 2.0, 15.0


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox. `digest` is of the request that made it."""

    replica: str
    owner: str = ""
    digest: str = ""
    labels: dict[str, str] = {}


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """`at` is Unix seconds of its last sign of life, `room` how many sandboxes more it takes."""

    name: str
    url: str
    room: int
    at: float

    def lives(self) -> bool:
        return time.time() - self.at < _SILENT_S


class Registry(Protocol):
    replica: str

    async def claim(self, sandbox_id: str, entry: Entry) -> bool:
        """False where somebody has it."""
        ...

    async def forget(self, sandbox_id: str) -> None: ...

    async def home_of(self, sandbox_id: str) -> Replica | None:
        """The living replica that has it, None where none does or this one."""
        ...

    async def replica_named(self, name: str) -> Replica | None: ...

    async def others(self) -> list[Replica]:
        """Living ones but this, the one with most room first."""
        ...


class Alone:
    """The registry of a replica that has no others."""

    replica = ""

    async def claim(self, sandbox_id: str, entry: Entry) -> bool:
        return True

    async def forget(self, sandbox_id: str) -> None:
        return

    async def home_of(self, sandbox_id: str) -> Replica | None:
        return None

    async def replica_named(self, name: str) -> Replica | None:
        return None

    async def others(self) -> list[Replica]:
        return []


class Shared:
    """The registry of replicas that share a bus."""

    def __init__(self, boxes: Bucket, replicas: Bucket, replica: str, url: str) -> None:
        self.replica = replica
        self._boxes = boxes
        self._replicas = replicas
        self._url = url

    @classmethod
    async def open(cls, bus: Bus, replica: str, url: str) -> "Shared":
        shared = cls(await bus.bucket(_BOXES), await bus.bucket(_REPLICAS), replica, url)
        await shared._forget_all_of({replica})  # a replica of this name that died: its boxes died with it
        return shared

    async def claim(self, sandbox_id: str, entry: Entry) -> bool:
        for _ in range(2):
            try:
                await self._boxes.create(sandbox_id, msgspec.json.encode(entry))
            except KeyWrongLastSequenceError:
                if await self.home_of(sandbox_id) is not None or (await self._entry(sandbox_id)) is not None:
                    return False
            else:
                return True
        return False

    async def forget(self, sandbox_id: str) -> None:
        await self._boxes.delete(sandbox_id)

    async def home_of(self, sandbox_id: str) -> Replica | None:
        entry = await self._entry(sandbox_id)
        if entry is None or entry.replica == self.replica:
            return None
        home = await self.replica_named(entry.replica)
        if home is None or not home.lives():
            await self.forget(sandbox_id)
            return None
        return home

    async def replica_named(self, name: str) -> Replica | None:
        with suppress(KeyNotFoundError):
            value = (await self._replicas.get(name)).value
            return msgspec.json.decode(value, type=Replica) if value else None
        return None

    async def others(self) -> list[Replica]:
        replicas = [await self.replica_named(name) for name in await _keys(self._replicas)]
        living = [replica for replica in replicas if replica and replica.lives() and replica.name != self.replica]
        return sorted(living, key=lambda replica: -replica.room)

    async def keep_telling(self, room: "RoomOf") -> None:
        """That this replica lives, and how much it can still take."""
        while True:
            await self.tell(room())
            await asyncio.sleep(_BEAT_S)

    async def tell(self, room: int) -> None:
        sign = Replica(name=self.replica, url=self._url, room=room, at=time.time())
        await self._replicas.put(self.replica, msgspec.json.encode(sign))

    async def leave(self) -> None:
        await self._replicas.delete(self.replica)

    async def forget_the_dead(self) -> int:
        """Entries of replicas that are silent; how many there were."""
        living = {replica.name for replica in await self.others()} | {self.replica}
        names = {entry.replica for entry in (await self._entries()).values()}
        return await self._forget_all_of(names - living)

    async def _forget_all_of(self, replicas: set[str]) -> int:
        gone = [sandbox for sandbox, entry in (await self._entries()).items() if entry.replica in replicas]
        for sandbox in gone:
            await self.forget(sandbox)
        return len(gone)

    async def _entries(self) -> Mapping[str, Entry]:
        found = {name: await self._entry(name) for name in await _keys(self._boxes)}
        return {name: entry for name, entry in found.items() if entry is not None}

    async def _entry(self, sandbox_id: str) -> Entry | None:
        with suppress(KeyNotFoundError):
            value = (await self._boxes.get(sandbox_id)).value
            return msgspec.json.decode(value, type=Entry) if value else None
        return None


class RoomOf(Protocol):
    def __call__(self) -> int: ...


async def _keys(bucket: Bucket) -> list[str]:
    try:
        return list(await bucket.keys())
    except NoKeysError:
        return []
