"""Published weights on an engine's own disk.

Promises: a folder that is returned has the bytes that its digest stands for, or is one that others keep; a download
that breaks off goes on where it was; what is kept here is bounded.
"""

import asyncio
import fcntl
import itertools
import os
import shutil
from pathlib import Path

from openforge.weights.check import check
from openforge.weights.manifest import BASE, MANIFEST, BadWeights, FileEntry, decode_manifest, digest_of, read_manifest
from openforge.weights.objects import ObjectLost, Objects, StoreRefused
from openforge.weights.stores import object_name

_KEPT = 2  # what is served, and what an engine goes back to if the next turns out bad


class Cache:
    """`root` may be shared by processes: each takes a numbered folder of it, one that an ended process left first.

    `bus` is where locations `nats://` lie.
    """

    def __init__(self, root: Path, bus: Objects) -> None:
        self._root = root
        self._bus = bus
        self._places: dict[str, Objects] = {}
        self._held: tuple[Path, int] | None = None
        self._whole: set[tuple[Path, str]] = set()
        self._served: list[Path] = []

    async def folder(self, location: str, digest: str) -> Path:
        """The weights of a `PolicyPublished`; raises `BadWeights` and `StoreRefused`, and `StoreBroken`: ask again."""
        if location.startswith("/"):
            return Path(location)
        place, _, rest = location.partition("://")
        if place not in ("s3", "nats") or rest.count("/") < 2:
            raise BadWeights(f"weights {location}: this engine knows folders, s3:// and nats://")
        url, run, name = location.rsplit("/", 2)
        folder = self._own() / name
        if (folder, digest) not in self._whole:
            await self._keep(folder, _draft(folder), *self._served)
            await self._have(self._objects_at(url), run, name, folder, digest)
        return folder

    async def _have(self, objects: Objects, run: str, name: str, folder: Path, digest: str) -> None:
        if (folder, digest) in self._whole:
            return
        if not await asyncio.to_thread(_is_whole, folder, digest):
            await self._fetch(objects, f"{run}/{name}", folder, digest)
        if base := read_manifest(folder).base:  # adapters, and the weights beside them that they belong to
            below = folder.with_name(BASE)
            await self._have(objects, run, object_name(run, BASE, base).rpartition("/")[2], below, base)
        self._whole.add((folder, digest))

    async def serves(self, folder: Path) -> None:
        """From now on; what nobody goes back to is removed."""
        if self._held is not None and folder.parent == self._held[0]:
            self._served = [*self._served[-_KEPT + 1 :], folder]
            await self._keep(*self._served)

    def close(self) -> None:
        """Another may have the folder."""
        if self._held is not None:
            os.close(self._held[1])
            self._held = None

    async def _fetch(self, objects: Objects, name: str, folder: Path, digest: str) -> None:
        draft = _draft(folder)
        draft.mkdir(exist_ok=True)
        try:
            data = await objects.read(f"{name}/{MANIFEST}")
            if digest_of(data) != digest:
                raise BadWeights(
                    f"weights {objects.url}/{name}: the manifest has digest {digest_of(data)[:12]}, expected "
                    f"{digest[:12]}."
                )
            for file, entry in decode_manifest(data, folder).files.items():
                await _get(objects, name, draft, file, entry)
        except ObjectLost as lost:
            raise BadWeights(f"weights {objects.url}/{name}: {lost}.") from lost
        (draft / MANIFEST).write_bytes(data)
        os.replace(draft, folder)

    async def _keep(self, *folders: Path) -> None:
        kept = {folder.name for folder in folders} | {BASE, f".{BASE}"}
        self._whole = {(folder, digest) for folder, digest in self._whole if folder.name in kept}
        await asyncio.to_thread(_remove_all_but, self._own(), kept)

    def _objects_at(self, url: str) -> Objects:
        if url == self._bus.url:
            return self._bus
        if url not in self._places:
            if not url.startswith("s3://"):
                raise StoreRefused(f"weights in {url}: this engine's bus has {self._bus.url}")
            from openforge.weights.s3 import S3Objects

            self._places[url] = S3Objects(url)
        return self._places[url]

    def _own(self) -> Path:
        """This process's folder, held until it ends, however it ends."""
        if self._held is None:
            self._held = _first_free(self._root)
        return self._held[0]


def _draft(folder: Path) -> Path:
    """Where it is as long as it is not whole."""
    return folder.with_name(f".{folder.name}")


def _first_free(root: Path) -> tuple[Path, int]:
    for number in itertools.count():
        folder = root / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        else:
            return folder, lock
    raise AssertionError("numbers do not end")


def _is_whole(folder: Path, digest: str) -> bool:
    """One that was damaged is removed."""
    if not folder.exists():
        return False
    try:
        check(folder, digest)
    except BadWeights:
        shutil.rmtree(folder)
        return False
    return True


async def _get(objects: Objects, name: str, draft: Path, file: str, entry: FileEntry) -> None:
    """One file, where it is not there yet; once again if the bytes are wrong, which a broken-off try may have left."""
    if Path(file).name != file:
        raise BadWeights(f"weights {objects.url}/{name}: the manifest names {file!r}, which is no plain file name.")
    path = draft / file
    for _ in range(2):
        if not path.exists() or path.stat().st_size < entry.bytes:
            await objects.get(f"{name}/{file}", path, entry.bytes)
        difference = await asyncio.to_thread(entry.difference, path)
        if not difference:
            return
        path.unlink()
    raise BadWeights(f"weights {objects.url}/{name}: {file} has {difference}.")


def _remove_all_but(folder: Path, names: set[str]) -> None:
    for entry in folder.iterdir():
        if entry.name not in names and entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
