"""Blobs as files of a folder that all services see: `ab/abcdef...`, written beside and renamed."""

import asyncio
import os
import secrets
from pathlib import Path

from openforge.blobs.contract import BlobLost, check, ref_to
from openforge.protos import BlobRef


class DirectoryBlobs:
    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    async def put(self, data: bytes) -> BlobRef:
        return await asyncio.to_thread(self._put, data)

    async def get(self, ref: BlobRef) -> bytes:
        try:
            data = await asyncio.to_thread(self._path(ref).read_bytes)
        except FileNotFoundError:
            raise BlobLost(f"blob {ref.digest} is not in {self._folder}") from None
        return check(ref, data)

    async def delete(self, ref: BlobRef) -> None:
        await asyncio.to_thread(self._path(ref).unlink, missing_ok=True)

    def _path(self, ref: BlobRef) -> Path:
        return self._folder / ref.digest[:2] / ref.digest

    def _put(self, data: bytes) -> BlobRef:
        ref = ref_to(data)
        path = self._path(ref)
        if path.exists() and path.stat().st_size == ref.size:
            return ref
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{ref.digest}.{secrets.token_hex(4)}")
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.rename(path)
        return ref
