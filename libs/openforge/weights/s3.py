"""Weights in S3 or what speaks like it, through `obstore`: credentials, region and endpoint by the usual AWS variables.

What a killed upload of many parts leaves is no object and not seen here: the bucket's own rule for such parts
(`AbortIncompleteMultipartUpload`) removes it.
"""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openforge.weights.objects import ObjectLost, StoreBroken, StoreRefused

_CREDENTIALS = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, and where it is not Amazon's, AWS_ENDPOINT_URL"
_PIECE_BYTES = 8 << 20
_PIECES_AT_ONCE = 8
_MOST_PARTS = 9000  # S3 takes 10,000
_NO_BUCKET = "NoSuchBucket"
_NO_CREDENTIALS = "169.254.169.254"  # where a machine of Amazon's would have some
_BEYOND_THE_END = "416 Range Not Satisfiable"
_RETRY = {"max_retries": 3}  # who asks tries again by itself, and says so
_TIMES = {"connect_timeout": "10s", "timeout": "120s"}  # of one part or piece


class S3Objects:
    """`url` is `s3://bucket` or `s3://bucket/prefix`."""

    def __init__(self, url: str) -> None:
        try:
            from obstore.store import from_url
        except ImportError:
            raise StoreRefused(
                f'weights in {url} need obstore: install "openforge[s3]" here, or use another store'
            ) from None
        self.url = url
        client = {**_TIMES, "allow_http": "true"}
        with self._said("open"):
            self._store: Any = from_url(url, retry_config=_RETRY, client_options=client)

    async def check(self, run: str) -> None:
        name = f"{run}/.check"
        with self._said("write"):
            await self._store.put_async(name, b"")
            await self._store.delete_async(name)
        await self.names(f"{run}/")

    async def names(self, prefix: str) -> list[str]:
        with self._said("list"):
            found = await self._store.list(prefix.rstrip("/")).collect_async()
        return [entry["path"] for entry in found if entry["path"].startswith(prefix)]

    async def put(self, name: str, file: Path) -> None:
        with self._said("write"), file.open("rb") as source:
            part = max(_PIECE_BYTES, os.fstat(source.fileno()).st_size // _MOST_PARTS + 1)
            await self._store.put_async(name, source, chunk_size=part)

    async def read(self, name: str) -> bytes:
        with self._said("read"):
            return bytes(await (await self._store.get_async(name)).bytes_async())

    async def get(self, name: str, into: Path, size: int) -> None:
        """Piece after piece to the end of `into`, so that a break costs a few pieces."""
        with into.open("ab") as file:
            while (have := file.tell()) < size:
                end = min(size, have + _PIECES_AT_ONCE * _PIECE_BYTES)
                asked = [(start, min(end, start + _PIECE_BYTES)) for start in range(have, end, _PIECE_BYTES)]
                with self._said("read"):
                    pieces = await asyncio.gather(*(self._piece(name, *piece) for piece in asked))
                await asyncio.to_thread(file.writelines, pieces)
                if file.tell() < end:  # it is shorter than it should be, as its sum will tell
                    return

    async def _piece(self, name: str, start: int, end: int) -> memoryview:
        """Less where the object ends before."""
        from obstore.exceptions import BaseError

        try:
            return memoryview(await self._store.get_range_async(name, start=start, end=end))
        except BaseError as error:
            if _BEYOND_THE_END in str(error):
                return memoryview(b"")
            raise

    async def delete(self, name: str) -> None:
        with self._said("delete"):
            await self._store.delete_async(name)

    async def sweep(self, run: str) -> None:
        """Nothing that can be seen."""

    @contextmanager
    def _said(self, act: str) -> Iterator[None]:
        """Errors of obstore as ours."""
        from obstore.exceptions import BaseError, NotFoundError, PermissionDeniedError, UnauthenticatedError

        try:
            yield
        except (FileNotFoundError, NotFoundError) as error:
            if _NO_BUCKET in str(error):
                raise self._no_bucket() from error
            if act == "write":  # a store has a place for what is new: this is none
                raise StoreBroken(f"{self.url}: {_first_line(error)}") from error
            raise ObjectLost(f"{self.url}: {_first_line(error)}") from error
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise StoreRefused(
                f"{self.url}: these credentials may not {act} there ({_first_line(error)}): set {_CREDENTIALS} to ones "
                "that may"
            ) from error
        except BaseError as error:
            if _NO_BUCKET in str(error):
                raise self._no_bucket() from error
            if _NO_CREDENTIALS in str(error):
                raise StoreRefused(f"{self.url}: there are no credentials: set {_CREDENTIALS}") from error
            raise StoreBroken(f"{self.url}: {_first_line(error)}") from error
        except OSError as error:
            raise StoreBroken(f"{self.url}: {error}") from error

    def _no_bucket(self) -> StoreRefused:
        bucket = self.url.removeprefix("s3://").partition("/")[0]
        return StoreRefused(f"{self.url}: there is no bucket {bucket!r}: make it, or name another")


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300]
