"""Checkpoints: one folder each, whole or not there.

Promises: a folder with its final name is complete and on disk; what no longer has all its bytes is
passed over; what another release wrote in a format of its own is refused; the `keep` newest and the
`keep_best` best stay.

    c000010/learner.json    what the learner knows, and the size of every other file
    c000010/state/          what the backend wrote
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import fmean

import msgspec

from openforge.service import BadSettings

SCHEMA = 1
MEMORY = "learner.json"
STATE = "state"
_NAME = re.compile(r"c(\d{6,})")


class ForeignCheckpoint(BadSettings):
    """It is whole, but its format is not ours."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """`batcher` is the encoded state of the fold up to `cursors`, in it the fate of every group that was consumed;
    `files` the sizes in bytes, by path; `config` the run's settings as canonical JSON; `rewards` the mean rewards of
    the newest batches. What has a default is missing in checkpoints that older releases wrote.
    """

    schema: int = SCHEMA
    version: int
    config_digest: str
    batcher: bytes
    cursors: dict[str, int]
    files: dict[str, int] = {}
    config: str = ""
    rewards: tuple[float, ...] = ()


class _Stamp(msgspec.Struct, frozen=True):
    schema: int


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    folder: Path
    memory: Memory

    @property
    def state(self) -> Path:
        return self.folder / STATE

    @property
    def version(self) -> int:
        return self.memory.version

    @property
    def reward(self) -> float | None:
        """The mean reward of the batches that led to it, as many as lie between two; None where nobody noted it."""
        return fmean(self.memory.rewards) if self.memory.rewards else None

    @property
    def bytes(self) -> int:
        return sum(self.memory.files.values())


class Checkpoints:
    """All checkpoints of a run, under `root`, where one learner at a time writes."""

    def __init__(self, root: Path, keep: int = 1, keep_best: int = 0) -> None:
        self.root = root
        self._keep = keep
        self._keep_best = keep_best

    def tidy(self) -> None:
        """Remove what a crash left half-written."""
        self.root.mkdir(parents=True, exist_ok=True)
        for draft in self.root.glob(".c*"):
            shutil.rmtree(draft, ignore_errors=True)

    def newest_first(self) -> Iterator[Checkpoint]:
        """All that are complete. Raises `ForeignCheckpoint`."""
        folders = (
            [folder for folder in self.root.iterdir() if _NAME.fullmatch(folder.name)] if self.root.exists() else []
        )
        for folder in sorted(folders, key=_version, reverse=True):
            memory = _memory(folder)
            if memory is not None and _sizes(folder) == memory.files:
                yield Checkpoint(folder=folder, memory=memory)

    def save(self, memory: Memory, write_state: Callable[[Path], None]) -> Path:
        """Write a checkpoint; `write_state` fills an empty folder and syncs what it wrote."""
        final = self.root / f"c{memory.version:06d}"
        draft = self.root / f".{final.name}"
        shutil.rmtree(draft, ignore_errors=True)
        (draft / STATE).mkdir(parents=True)
        write_state(draft / STATE)
        memory = msgspec.structs.replace(memory, files=_sizes(draft))
        _write(draft / MEMORY, msgspec.json.encode(memory))
        _sync(draft / STATE)
        _sync(draft)
        self._remove(final)
        os.replace(draft, final)
        _sync(self.root)
        self._prune()
        return final

    def put_aside(self, checkpoint: Checkpoint) -> Path:
        """Where a checkpoint lies from now on that has all its bytes but cannot be loaded."""
        aside = self.root / f"broken-{checkpoint.folder.name}"
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(checkpoint.folder, aside)
        return aside

    def _prune(self) -> None:
        whole = list(self.newest_first())
        kept = [*whole[: self._keep], *best_first(whole)[: self._keep_best]]
        for checkpoint in whole:
            if checkpoint not in kept:
                self._remove(checkpoint.folder)

    def _remove(self, folder: Path) -> None:
        """Its name first: a crash leaves a draft, which the next start removes."""
        if folder.exists():
            gone = folder.with_name(f".{folder.name}-removed")
            shutil.rmtree(gone, ignore_errors=True)
            shutil.rmtree(folder.replace(gone), ignore_errors=True)


def best_first(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Those with a reward, the highest first; of equals the newest."""
    judged = [(reward, one.version, one) for one in checkpoints if (reward := one.reward) is not None]
    return [one for _, _, one in sorted(judged, key=lambda entry: entry[:2], reverse=True)]


def _version(folder: Path) -> int:
    return int(folder.name[1:])


def _memory(folder: Path) -> Memory | None:
    """None where it is torn."""
    try:
        data = (folder / MEMORY).read_bytes()
        schema = msgspec.json.decode(data, type=_Stamp).schema
        if schema == SCHEMA:
            return msgspec.json.decode(data, type=Memory)
    except (OSError, msgspec.DecodeError):
        return None
    raise ForeignCheckpoint(
        f"checkpoint {folder} has format {schema}, and this release reads format {SCHEMA}: go on with the release that "
        "wrote it, or move the folder away, so that its batches are computed again from the checkpoint before it"
    )


def _sizes(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MEMORY
    }


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
