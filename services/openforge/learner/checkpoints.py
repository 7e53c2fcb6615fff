"""Checkpoints: one folder each, whole or not there.

Promises: a folder with its final name is complete and on disk; what no longer has all its bytes is
passed over; the `keep` newest stay.

    c000010/learner.json    what the learner knows, and the size of every other file
    c000010/state/          what the backend wrote
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

SCHEMA = 1
MEMORY = "learner.json"
STATE = "state"
_NAME = re.compile(r"c(\d{6,})")


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """`batcher` is the encoded state of the fold up to `cursors`; `files` the sizes in bytes, by path."""

    schema: int = SCHEMA
    version: int
    config_digest: str
    batcher: bytes
    cursors: dict[str, int]
    files: dict[str, int] = {}


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    folder: Path
    memory: Memory

    @property
    def state(self) -> Path:
        return self.folder / STATE


class Checkpoints:
    """All checkpoints of a run, under `root`, which belongs to one learner at a time."""

    def __init__(self, root: Path, keep: int) -> None:
        self.root = root
        self._keep = keep

    def tidy(self) -> None:
        """Remove what a crash left half-written."""
        self.root.mkdir(parents=True, exist_ok=True)
        for draft in self.root.glob(".c*"):
            shutil.rmtree(draft, ignore_errors=True)

    def newest_first(self) -> Iterator[Checkpoint]:
        """All that are complete."""
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
        shutil.rmtree(final, ignore_errors=True)
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
        for old in list(self.newest_first())[self._keep :]:
            shutil.rmtree(old.folder, ignore_errors=True)


def _version(folder: Path) -> int:
    return int(folder.name[1:])


def _memory(folder: Path) -> Memory | None:
    try:
        memory = msgspec.json.decode((folder / MEMORY).read_bytes(), type=Memory)
    except (OSError, msgspec.DecodeError):
        return None
    return memory if memory.schema == SCHEMA else None


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
