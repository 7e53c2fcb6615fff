"""Blobs in S3 or what speaks like it, through `obstore`. Credentials come from the usual AWS variables."""

from typing import Any

from openforge.blobs.contract import BlobLost, check, ref_to
from openforge.protos import BlobRef


class S3Blobs:
    """`store` is any store of obstore's, so that tests may use its memory store."""

    def __init__(self, store: Any) -> None:
        self._store = store

    @classmethod
    def at(cls, url: str) -> "S3Blobs":
        from obstore.store import from_url

        return cls(from_url(url))

    async def put(self, data: bytes) -> BlobRef:
        ref = ref_to(data)
        await self._store.put_async(_path(ref), data)
        return ref

    async def get(self, ref: BlobRef) -> bytes:
        try:
            result = await self._store.get_async(_path(ref))
        except FileNotFoundError:
            raise BlobLost(f"blob {ref.digest} is not in the bucket") from None
        return check(ref, bytes(await result.bytes_async()))

    async def delete(self, ref: BlobRef) -> None:
        await self._store.delete_async(_path(ref))


def _path(ref: BlobRef) -> str:
    return f"{ref.digest[:2]}/{ref.digest}"
