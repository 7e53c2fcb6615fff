"""Blobs in a JetStream object store, in the layout that every NATS client reads.

Promises: an object's meta message comes after all its chunks, so what can be found is whole; the
same bytes are stored once.
"""

import asyncio
import base64
import hashlib
import secrets
from datetime import UTC, datetime

import msgspec

from openforge.blobs import BlobLost, check, ref_to
from openforge.bus.errors import BusError
from openforge.bus.link import Ack, Link
from openforge.bus.lookup import all_on, last_on
from openforge.protos import BlobRef

CHUNK = 128 * 1024
_IN_FLIGHT = 32
_ROLLUP = {"Nats-Rollup": "sub"}


class _Meta(msgspec.Struct, omit_defaults=True):
    name: str
    bucket: str
    nuid: str
    size: int
    chunks: int
    digest: str
    mtime: str = ""
    deleted: bool = False
    options: dict[str, int] = {}


class ObjectStoreBlobs:
    def __init__(self, link: Link, store: str) -> None:
        self._link = link
        self._store = store
        self._stream = f"OBJ_{store}"

    async def put(self, data: bytes) -> BlobRef:
        ref = ref_to(data)
        if await self._meta(ref) is not None:
            return ref
        nuid = secrets.token_hex(11)
        chunks = await self._put_chunks(f"$O.{self._store}.C.{nuid}", data)
        meta = _Meta(
            name=ref.digest,
            bucket=self._store,
            nuid=nuid,
            size=len(data),
            chunks=chunks,
            digest="SHA-256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode(),
            mtime=datetime.now(UTC).isoformat(),
            options={"max_chunk_size": CHUNK},
        )
        await self._link.publish(self._meta_subject(ref), msgspec.json.encode(meta), dict(_ROLLUP))
        return ref

    async def get(self, ref: BlobRef) -> bytes:
        meta = await self._meta(ref)
        if meta is None:
            raise BlobLost(f"blob {ref.digest} is not in the object store {self._store}")
        chunks: dict[str, bytes] = {}
        async for message in all_on(self._link, self._stream, f"$O.{self._store}.C.{meta.nuid}"):
            headers = message.headers or {}
            # a chunk that was sent twice because its answer got lost lies there twice, with one id
            chunks.setdefault(headers.get("Of-Chunk", headers["Nats-Sequence"]), message.data)
        return check(ref, b"".join(chunk for _, chunk in sorted(chunks.items(), key=lambda item: int(item[0]))))

    async def delete(self, ref: BlobRef) -> None:
        meta = await self._meta(ref)
        if meta is None:
            return
        meta.deleted = True
        await self._link.publish(self._meta_subject(ref), msgspec.json.encode(meta), dict(_ROLLUP))
        await self._link.ask_api(f"STREAM.PURGE.{self._stream}", {"filter": f"$O.{self._store}.C.{meta.nuid}"})

    def _meta_subject(self, ref: BlobRef) -> str:
        return f"$O.{self._store}.M.{base64.urlsafe_b64encode(ref.digest.encode()).decode()}"

    async def _meta(self, ref: BlobRef) -> _Meta | None:
        message = await last_on(self._link, self._stream, self._meta_subject(ref))
        if message is None:
            return None
        meta = msgspec.json.decode(message.data, type=_Meta)
        return None if meta.deleted else meta

    async def _put_chunks(self, subject: str, data: bytes) -> int:
        slots = asyncio.Semaphore(_IN_FLIGHT)

        async def put_chunk(index: int, chunk: bytes) -> Ack:
            async with slots:
                headers = {"Of-Chunk": str(index), "Nats-Msg-Id": f"{subject}.{index}"}
                return await self._link.publish(subject, chunk, headers)

        chunks = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
        try:
            async with asyncio.TaskGroup() as group:
                for index, chunk in enumerate(chunks):
                    group.create_task(put_chunk(index, chunk))
        except* BusError as failed:
            raise failed.exceptions[0] from None
        return len(chunks)
