"""A JetStream object store, in the layout that every NATS client reads.

Promises: an object's meta message comes after all its chunks, so what can be found is whole.
"""

import asyncio
import base64
import hashlib
import secrets
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from io import BytesIO
from typing import BinaryIO

import msgspec

from openforge.blobs import BlobLost, check, ref_to
from openforge.bus.errors import BusError
from openforge.bus.link import Ack, Fenced, Link
from openforge.bus.lookup import all_on, last_on, subjects_on
from openforge.protos import BlobRef

CHUNK = 128 * 1024
_IN_FLIGHT = 32
_ROLLUP = {"Nats-Rollup": "sub"}
_FIRST = {"Nats-Expected-Last-Subject-Sequence": "0"}
_OWNER_LENGTH = 8


class Meta(msgspec.Struct, omit_defaults=True):
    name: str
    bucket: str
    nuid: str
    size: int
    chunks: int
    digest: str
    mtime: str = ""
    deleted: bool = False
    options: dict[str, int] = {}


class ObjectStore:
    """Objects by name. `owner` is whoever alone puts some of them, and may sweep what its own puts left."""

    def __init__(self, link: Link, name: str) -> None:
        self.name = name
        self.stream = f"OBJ_{name}"
        self._link = link

    async def meta(self, name: str) -> Meta | None:
        """None where there is no such object."""
        message = await last_on(self._link, self.stream, self._meta_subject(name))
        if message is None:
            return None
        meta = msgspec.json.decode(message.data, type=Meta)
        return None if meta.deleted else meta

    async def names(self) -> list[str]:
        """Of all objects that were not forgotten; a deleted one is still named."""
        subjects = await subjects_on(self._link, self.stream, f"$O.{self.name}.M.>")
        return [base64.urlsafe_b64decode(subject.rpartition(".")[2]).decode() for subject in subjects]

    async def put(self, name: str, source: BinaryIO, owner: str = "") -> None:
        """What an owner puts is put once: where something is by now, it stays."""
        nuid = _owned_by(owner) + secrets.token_hex(7)
        size, chunks, digest = await self._put_chunks(self._chunk_subject(nuid), source)
        meta = Meta(
            name=name,
            bucket=self.name,
            nuid=nuid,
            size=size,
            chunks=chunks,
            digest="SHA-256=" + base64.urlsafe_b64encode(digest).decode(),
            mtime=datetime.now(UTC).isoformat(),
            options={"max_chunk_size": CHUNK},
        )
        try:
            headers = _ROLLUP | (_FIRST if owner else {})
            await self._link.publish(self._meta_subject(name), msgspec.json.encode(meta), headers)
        except Fenced:
            there = await self.meta(name)
            if there is not None and there.nuid != nuid:  # else it is ours, and its answer got lost
                await self._purge(self._chunk_subject(nuid))

    async def chunks(self, meta: Meta) -> AsyncIterator[tuple[int, bytes]]:
        """Each chunk and its place in the object, which need not be their order; one may come twice."""
        place = 0
        async for message in all_on(self._link, self.stream, self._chunk_subject(meta.nuid)):
            # a chunk that was sent twice because its answer got lost lies there twice, with one number
            yield int((message.headers or {}).get("Of-Chunk", place)), message.data
            place += 1

    async def delete(self, name: str) -> None:
        """A message stays that says so, as clients that watch expect."""
        meta = await self.meta(name)
        if meta is None:
            return
        meta.deleted = True
        await self._link.publish(self._meta_subject(name), msgspec.json.encode(meta), dict(_ROLLUP))
        await self._purge(self._chunk_subject(meta.nuid))

    async def forget(self, name: str) -> None:
        """Nothing stays."""
        meta = await self.meta(name)
        await self._purge(self._meta_subject(name))
        if meta is not None:
            await self._purge(self._chunk_subject(meta.nuid))

    async def sweep(self, owner: str) -> None:
        """Remove the chunks of this owner's that belong to no object: puts that broke off."""
        chunks = await subjects_on(self._link, self.stream, f"$O.{self.name}.C.>")
        own = {nuid for subject in chunks if (nuid := subject.rpartition(".")[2]).startswith(_owned_by(owner))}
        whole = {meta.nuid for name in (await self.names() if own else ()) if (meta := await self.meta(name))}
        for nuid in own - whole:
            await self._purge(self._chunk_subject(nuid))

    async def room(self) -> tuple[int, int]:
        """Bytes that are used, and that may be; 0 is no limit."""
        info = await self._link.ask_api(f"STREAM.INFO.{self.stream}")
        return int(info["state"]["bytes"]), max(0, int(info["config"].get("max_bytes", 0)))

    def _meta_subject(self, name: str) -> str:
        return f"$O.{self.name}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"

    def _chunk_subject(self, nuid: str) -> str:
        return f"$O.{self.name}.C.{nuid}"

    async def _purge(self, subject: str) -> None:
        await self._link.ask_api(f"STREAM.PURGE.{self.stream}", {"filter": subject})

    async def _put_chunks(self, subject: str, source: BinaryIO) -> tuple[int, int, bytes]:
        """Their bytes, their number and their sha256."""
        slots = asyncio.Semaphore(_IN_FLIGHT)
        digest = hashlib.sha256()
        size = count = 0

        async def put_chunk(index: int, chunk: bytes) -> Ack:
            try:
                headers = {"Of-Chunk": str(index), "Nats-Msg-Id": f"{subject}.{index}"}
                return await self._link.publish(subject, chunk, headers)
            finally:
                slots.release()

        try:
            async with asyncio.TaskGroup() as group:
                while chunk := source.read(CHUNK):
                    await slots.acquire()
                    group.create_task(put_chunk(count, chunk))
                    digest.update(chunk)
                    size, count = size + len(chunk), count + 1
        except* BusError as failed:
            raise failed.exceptions[0] from None
        return size, count, digest.digest()


class ObjectStoreBlobs:
    """Blobs as objects that are named by their digest: the same bytes are stored once."""

    def __init__(self, link: Link, store: str) -> None:
        self._objects = ObjectStore(link, store)

    async def put(self, data: bytes) -> BlobRef:
        ref = ref_to(data)
        if await self._objects.meta(ref.digest) is None:
            await self._objects.put(ref.digest, BytesIO(data))
        return ref

    async def get(self, ref: BlobRef) -> bytes:
        meta = await self._objects.meta(ref.digest)
        if meta is None:
            raise BlobLost(f"blob {ref.digest} is not in the object store {self._objects.name}")
        chunks = dict([chunk async for chunk in self._objects.chunks(meta)])
        return check(ref, b"".join(chunks[index] for index in sorted(chunks)))

    async def delete(self, ref: BlobRef) -> None:
        await self._objects.delete(ref.digest)


def _owned_by(owner: str) -> str:
    """What the ids of an owner's puts begin with."""
    return hashlib.sha256(owner.encode()).hexdigest()[:_OWNER_LENGTH] if owner else secrets.token_hex(4)
