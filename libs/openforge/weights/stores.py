"""Where a learner publishes: a folder that engines see, or objects that they fetch.

Promises: a location can be read by whoever has it and the rights; what is at one is whole before it is returned, and
publishing the same folder again changes nothing; versions in use are never removed.
"""

import asyncio
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from openforge.weights.check import check
from openforge.weights.manifest import BASE, MANIFEST, BadWeights, read_manifest
from openforge.weights.objects import Objects
from openforge.weights.retention import keep_newest, superfluous
from openforge.weights.write import drafted

_IN_NAME = 12


class Store(Protocol):
    """One run's. All methods raise `StoreRefused`, or `StoreBroken` where trying again may help."""

    async def check(self) -> None:
        """Whether weights can be published here."""
        ...

    async def publish(self, folder: Path, digest: str) -> str:
        """The location of a complete weights folder from now on."""
        ...

    async def has(self, location: str, digest: str) -> bool:
        """Whether all of it is still there."""
        ...

    async def forget_old(self, keep: int, in_use: Collection[str]) -> None:
        """Keep the newest and those in use (folder names), and nothing that a crash left."""
        ...


def object_name(run: str, folder: str, digest: str) -> str:
    """Below which a folder's files lie: other bytes have another name."""
    return f"{run}/{folder}-{digest[:_IN_NAME]}"


def store_at(where: str, run: str, own: Path, bus: Objects) -> Store:
    """What `weights.store` of a run file says: nothing for the learner's `own` folder, a folder, `s3://...`, `nats`."""
    if where == "nats":
        return ObjectStore(bus, run)
    if where.startswith("s3://"):
        from openforge.weights.s3 import S3Objects

        return ObjectStore(S3Objects(where.rstrip("/")), run)
    return FolderStore(Path(where) / run if where else own)


class FolderStore:
    """A folder that engines see under the same path, and read in place."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()  # as the folders that are published have to be

    async def check(self) -> None:
        await asyncio.to_thread(self._root.mkdir, parents=True, exist_ok=True)

    async def publish(self, folder: Path, digest: str) -> str:
        there = self._root / folder.name
        if folder != there:
            for part, sum_ in ((folder, digest), *_below(folder)):
                if not await self.has(str(self._root / part.name), sum_):
                    await asyncio.to_thread(self._copy, part, self._root / part.name)
        return str(there)

    async def has(self, location: str, digest: str) -> bool:
        try:
            await asyncio.to_thread(check, location, digest)
        except BadWeights:
            return False
        return Path(location).parent == self._root

    async def forget_old(self, keep: int, in_use: Collection[str]) -> None:
        await asyncio.to_thread(keep_newest, self._root, keep, in_use)

    def _copy(self, folder: Path, there: Path) -> None:
        with drafted(there) as draft:
            for file in folder.iterdir():
                shutil.copyfile(file, draft / file.name)


class ObjectStore:
    """Objects `<run>/v000012-0-<digest>/<file>`, the manifest last: without one it is nothing yet, or no longer."""

    def __init__(self, objects: Objects, run: str) -> None:
        self._objects = objects
        self._run = run

    async def check(self) -> None:
        await self._objects.check(self._run)

    async def publish(self, folder: Path, digest: str) -> str:
        for part, sum_ in _below(folder):
            await self._put(part, object_name(self._run, part.name, sum_))
        name = object_name(self._run, folder.name, digest)
        await self._put(folder, name)
        return f"{self._objects.url}/{name}"

    async def _put(self, folder: Path, name: str) -> None:
        there = set(await self._objects.names(f"{name}/"))
        for file in (*read_manifest(folder).files, MANIFEST):
            if f"{name}/{file}" not in there:
                await self._objects.put(f"{name}/{file}", folder / file)

    async def has(self, location: str, digest: str) -> bool:
        within = location.removeprefix(f"{self._objects.url}/")
        return within != location and f"{within}/{MANIFEST}" in await self._objects.names(f"{within}/")

    async def forget_old(self, keep: int, in_use: Collection[str]) -> None:
        names = await self._objects.names(f"{self._run}/")
        files: dict[str, list[str]] = {}
        for name in names:
            files.setdefault(name.split("/")[1], []).append(name.rpartition("/")[2])
        whole = [version for version, held in files.items() if MANIFEST in held]
        gone = {*superfluous(whole, keep, in_use), *(files.keys() - set(whole))}
        for version in sorted(gone):
            for file in sorted(files[version], key=lambda name: name != MANIFEST):  # it is nothing from then on
                await self._objects.delete(f"{self._run}/{version}/{file}")
        await self._objects.sweep(self._run)


def _below(folder: Path) -> list[tuple[Path, str]]:
    """The folder of the weights that adapters in this one belong to, and its digest."""
    base = read_manifest(folder).base
    return [(folder.with_name(BASE), base)] if base else []
