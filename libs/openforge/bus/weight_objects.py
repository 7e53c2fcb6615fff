"""Weights in the bus's own object store `of_weights`.

Promises: breaks and restarts of the server are waited out; a store that is too full says so instead of waiting.
"""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from nats.js.errors import APIError

from openforge.bus.errors import BusClosed, BusError
from openforge.bus.link import Link
from openforge.bus.object_store import CHUNK, Meta, ObjectStore
from openforge.bus.streams import WEIGHT_STORE
from openforge.weights.objects import ObjectLost, StoreBroken, StoreRefused


class BusObjects:
    url = f"nats://{WEIGHT_STORE}"

    def __init__(self, link: Link) -> None:
        self._store = ObjectStore(link, WEIGHT_STORE)

    async def check(self, run: str) -> None:
        name = f"{run}/.check"
        with _said():
            await self._store.put(name, BytesIO(b""), run)
            await self._store.forget(name)

    async def names(self, prefix: str) -> list[str]:
        with _said():
            return [name for name in await self._store.names() if name.startswith(prefix)]

    async def put(self, name: str, file: Path) -> None:
        with _said():
            used, most = await self._store.room()
            with file.open("rb") as source:
                size = os.fstat(source.fileno()).st_size
                if most and used + size > most:
                    raise StoreRefused(
                        f"{self.url} holds {used} of {most} bytes, and {file.name} has {size}: raise "
                        "OPENFORGE_WEIGHTS_MAX_BYTES, or lower engine.keep_versions"
                    )
                await self._store.put(name, source, name.partition("/")[0])

    async def read(self, name: str) -> bytes:
        with _said():
            meta = await self._meta(name)
            chunks = dict([chunk async for chunk in self._store.chunks(meta)])
            return b"".join(chunks[index] for index in sorted(chunks))

    async def get(self, name: str, into: Path, size: int) -> None:
        """From the start: a break does not end it."""
        with _said():
            meta = await self._meta(name)
            with into.open("wb") as file:
                async for index, chunk in self._store.chunks(meta):
                    file.seek(index * CHUNK)
                    await asyncio.to_thread(file.write, chunk)

    async def delete(self, name: str) -> None:
        with _said():
            await self._store.forget(name)

    async def sweep(self, run: str) -> None:
        with _said():
            await self._store.sweep(run)

    async def _meta(self, name: str) -> Meta:
        if (meta := await self._store.meta(name)) is None:
            raise ObjectLost(f"{self.url}: {name} is not there")
        return meta


@contextmanager
def _said() -> Iterator[None]:
    """Errors of the bus as ours; a closed bus is the process's own end."""
    try:
        yield
    except BusClosed:
        raise
    except BusError as error:
        raise StoreRefused(f"{BusObjects.url}: {error}") from error
    except APIError as error:
        if error.code == 404:
            raise StoreRefused(
                f"{BusObjects.url}: there is no such store: run `openforge bus set-up` as operator"
            ) from error
        raise StoreBroken(f"{BusObjects.url}: {error.description}") from error
