"""Snapshots: what a folder knows, so that its restart reads little.

Promises: `recall` gives the last snapshot that was remembered whole, never half of one.
"""

import time

import msgspec
from nats.aio.msg import Msg

from openforge.blobs import Blobs
from openforge.bus.envelope import blob_claim
from openforge.bus.link import Link
from openforge.bus.lookup import last_on
from openforge.bus.receive import payload_of
from openforge.bus.streams import SNAPSHOT_BUCKET
from openforge.bus.tell import sealed
from openforge.bus.told import Cursors, Snapshot
from openforge.protos import BlobRef, token


class _Remembered(msgspec.Struct, frozen=True, kw_only=True):
    """`name` and `at` make the bytes of every snapshot its own, so that its blob can be deleted later."""

    name: str
    at: float
    state: bytes
    cursors: dict[str, int]


class Snapshots:
    def __init__(self, link: Link, blobs: Blobs) -> None:
        self._link = link
        self._blobs = blobs

    async def remember(self, name: str, snapshot: Snapshot) -> None:
        before = await self._last(name)
        remembered = _Remembered(name=name, at=time.time(), state=snapshot.state, cursors=snapshot.cursors.sequences)
        headers: dict[str, str] = {}
        payload = await sealed(self._link, self._blobs, msgspec.msgpack.encode(remembered), headers)
        await self._link.publish(_subject(name), payload, headers)
        if before is not None and (claim := blob_claim(before.headers)):
            await self._blobs.delete(BlobRef(*claim))

    async def recall(self, name: str) -> Snapshot | None:
        message = await self._last(name)
        if message is None:
            return None
        remembered = msgspec.msgpack.decode(await payload_of(message, self._blobs), type=_Remembered)
        return Snapshot(state=remembered.state, cursors=Cursors(remembered.cursors))

    async def _last(self, name: str) -> Msg | None:
        return await last_on(self._link, f"KV_{SNAPSHOT_BUCKET}", _subject(name))


def _subject(name: str) -> str:
    return f"$KV.{SNAPSHOT_BUCKET}.{'.'.join(token('snapshot', part) for part in name.split('.'))}"
