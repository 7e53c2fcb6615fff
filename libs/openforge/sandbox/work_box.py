"""What the boxes of all drivers share: commands and files become orders for our program inside, ends become results.

Promises: a path is refused here where no file could have it; of more output than a cap the first and the last half are
kept; a command is over within its time and that of its death.
"""

import abc
import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from openforge.sandbox import archive
from openforge.sandbox.contract import ExecResult, FileInfo, PathMissing, PathRefused, SandboxLost, TooLarge
from openforge.sandbox.inside.commands import CANNOT_START, RUN, RUN_PRIVATELY
from openforge.sandbox.inside.files import MISSING, REFUSED, TOO_LARGE

_BASE_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "USER": "agent",
    "SHELL": "/bin/sh",
}
_FILE_TIMEOUT_S = 60.0
_MOST_ENTRY_BYTES = 320  # a name of 255 bytes, and what is said of it
_REFUSALS = {REFUSED: PathRefused, MISSING: PathMissing, TOO_LARGE: TooLarge}
_NO_COMMAND = "a command cannot be empty or hold a NUL byte"
_TIMED_OUT = 124


class Kept:
    """The first and the last half of a cap's worth of bytes."""

    def __init__(self, cap: int) -> None:
        self._head_left = cap - cap // 2
        self._tail_cap = cap // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.truncated = False

    def add(self, data: bytes) -> None:
        fits = min(self._head_left, len(data))
        self._head += data[:fits]
        self._head_left -= fits
        self._tail += data[fits:]
        if len(self._tail) > self._tail_cap:
            self.truncated = True
            del self._tail[: len(self._tail) - self._tail_cap]

    @property
    def data(self) -> bytes:
        return bytes(self._head + self._tail)


class WorkBox(abc.ABC):
    """Commands and files of a sandbox in which our init, or a process of its kind, takes orders."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env: dict[str, str] = {}
        self._stopping: asyncio.Future[None] | None = None
        self.use_env(env)

    @abc.abstractmethod
    async def _run(self, work: list[bytes], *, timeout_s: float, stdin: bytes, cap: int) -> ExecResult:
        """Have the order `work` done; raises `SandboxLost`."""

    @abc.abstractmethod
    def _begin_to_stop(self) -> "asyncio.Future[None]":
        """Done when nothing of it is left. Called once."""

    async def stop(self) -> None:
        """Every caller waits for the same end."""
        if self._stopping is None:
            self._stopping = self._begin_to_stop()
        await asyncio.shield(self._stopping)

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float,
        cwd: str = "/workspace",
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        output_cap: int = 1 << 20,
        private: bool = False,
    ) -> ExecResult:
        work = self._work(command, cwd, env)
        if not work:
            return ExecResult(exit_code=CANNOT_START, stdout=b"", stderr=_NO_COMMAND.encode() + b"\n")
        if private:
            work[0] = RUN_PRIVATELY
        return await self._run(work, timeout_s=timeout_s, stdin=stdin, cap=output_cap)

    def use_env(self, env: Mapping[str, str]) -> None:
        """What commands find in their environment from now on."""
        self._env = {**_BASE_ENV, **env}

    def _work_on_terminal(
        self, command: str | Sequence[str], cwd: str, env: Mapping[str, str] | None, rows: int, cols: int
    ) -> tuple[list[bytes], list[bytes]]:
        """The init's order to run it there, and the size; raises `ValueError` where no kernel could."""
        work = self._work(command, cwd, {"TERM": "xterm-256color", **(env or {})})
        if not work:
            raise ValueError(_NO_COMMAND)
        return work, size_of(rows, cols)

    def _work(self, command: str | Sequence[str], cwd: str, env: Mapping[str, str] | None) -> list[bytes]:
        """The init's order to run it; empty where no kernel could."""
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        pairs = [f"{key}={value}" for key, value in {**self._env, **(env or {})}.items()]
        texts = [_encode(text) for text in (cwd, *argv, *pairs)]
        if not argv or any(b"\0" in text for text in texts):
            return []
        return [RUN, texts[0], b"%d" % len(argv), *texts[1:]]

    async def list_files(self, path: str, *, most: int = 10_000) -> list[FileInfo]:
        work = [b"list", _encode(_absolute(path)), b"%d" % most]
        return archive.files_of_entries(await self._files(work, cap=most * _MOST_ENTRY_BYTES))

    async def put(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        folder, name = os.path.split(_absolute(path))
        if not name:
            raise PathRefused(f"{path!r}: is a folder")
        await self._files([b"unpack", _encode(folder), b"follow"], stdin=archive.one_file(name, data, mode))

    async def put_tar(self, path: str, tar: bytes) -> None:
        await self._files([b"unpack", _encode(_absolute(path)), b""], stdin=archive.entries_of_tar(tar))

    async def get(self, path: str, *, cap: int = 8 << 20) -> bytes:
        return await self._files([b"read", _encode(_absolute(path)), b"%d" % cap], cap=cap)

    async def get_tar(self, paths: Sequence[str], *, cap: int = 64 << 20) -> bytes:
        asked = [_absolute(path) for path in paths]
        work = [b"pack", b"%d" % cap, *map(_encode, asked)]
        return archive.tar_of_entries(await self._files(work, cap=2 * cap + (64 << 20)), asked)

    async def _files(self, work: list[bytes], *, stdin: bytes = b"", cap: int = 1 << 16) -> bytes:
        result = await self._run(work, timeout_s=_FILE_TIMEOUT_S, stdin=stdin, cap=cap * 2)
        if result.exit_code == 0 and not result.truncated:
            return result.stdout
        reason = result.stderr.decode(errors="replace").strip() or f"ended with {result.exit_code}"
        if refusal := _REFUSALS.get(result.exit_code):
            raise refusal(reason)
        if result.timed_out or result.out_of_memory or result.truncated:
            raise PathRefused(f"too much for this sandbox: {reason}")
        raise SandboxLost(f"file access failed: {reason}")


async def ends_within(ended: "asyncio.Future[Any]", time_s: float) -> bool:
    await asyncio.wait([ended], timeout=time_s)
    return ended.done()


async def dies(ended: "asyncio.Future[Any]", death_s: float) -> None:
    """A command that was killed; raises `SandboxLost` where it lives on."""
    if not await ends_within(ended, death_s):
        raise SandboxLost(f"a command was still there {death_s:.0f} s after it was killed")


def result_of(code: int, out: Kept, err: Kept, *, timed_out: bool, out_of_memory: bool, began: float) -> ExecResult:
    """`began` is by the monotonic clock."""
    return ExecResult(
        exit_code=_TIMED_OUT if timed_out else code,
        stdout=out.data,
        stderr=err.data,
        truncated=out.truncated or err.truncated,
        timed_out=timed_out,
        out_of_memory=out_of_memory,
        wall_s=time.monotonic() - began,
    )


def size_of(rows: int, cols: int) -> list[bytes]:
    """Of a terminal, as the init reads it."""
    return [b"%d" % within_window(length) for length in (rows, cols)]


def within_window(length: int) -> int:
    """Rows or columns that a terminal can have."""
    return max(1, min(length, 0xFFFF))


def _encode(text: str) -> bytes:
    """As the file system would; what no file system can hold is replaced."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise PathRefused(f"{path!r}: give the path from the root")
    if "\0" in path or len(path) > 4000:
        raise PathRefused(f"{path[:80]!r}: no path of any file")
    if ".." in path.split("/"):
        raise PathRefused(f"{path!r}: give the path without ..")
    return path
