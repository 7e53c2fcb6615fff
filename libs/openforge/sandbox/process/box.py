"""One running sandbox: commands and files by way of the init inside it."""

import abc
import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from openforge.sandbox.contract import ExecResult, FileInfo, PathMissing, PathRefused, SandboxLost, Terminal, TooLarge
from openforge.sandbox.process import archive
from openforge.sandbox.process.cgroups import CommandGroups
from openforge.sandbox.process.init import (
    CANNOT_START,
    COMMANDS,
    MISSING,
    REFUSED,
    RUN,
    RUN_PRIVATELY,
    TOO_LARGE,
    fields_of,
    frame,
)
from openforge.sandbox.process.pipes import Drain, Feed
from openforge.sandbox.process.terminal import ProcessTerminal, within_window

_BASE_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "USER": "agent",
    "SHELL": "/bin/sh",
}
_FILE_TIMEOUT_S = 60.0
_DEATH_S = 10.0
_LINGER_S = 0.2  # output of a background process that outlives its command is not waited for
_MOST_REQUEST_BYTES = 4 << 20
_MOST_REPLY_BYTES = 4096
_MOST_ENTRY_BYTES = 320  # a name of 255 bytes, and what is said of it
_REFUSALS = {REFUSED: PathRefused, MISSING: PathMissing, TOO_LARGE: TooLarge}
NO_COMMAND = "a command cannot be empty or hold a NUL byte"
TIMED_OUT = 124


class Control:
    """The socket to the init: numbered requests with descriptors out, numbered ends back."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self._terminals: dict[int, asyncio.Future[tuple[int, int]]] = {}
        self._sending = asyncio.Lock()
        self._next = 0
        self.ready: asyncio.Future[list[int]] = self._loop.create_future()
        self.open = True
        sock.setblocking(False)
        self._loop.add_reader(sock, self._read)

    def number(self) -> int:
        self._next += 1
        return self._next

    async def ask(self, op: bytes, number: int, fields: Sequence[bytes] = (), fds: Sequence[int] = ()) -> None:
        """Send one request; raises `SandboxLost`."""
        data = frame(op, b"%d" % number, *fields)
        if len(data) > _MOST_REQUEST_BYTES:
            raise ValueError(f"a command of {len(data)} bytes: put it into a file, {_MOST_REQUEST_BYTES} is the most")
        async with self._sending:
            try:
                if fds:
                    socket.send_fds(self._sock, [data[:4]], fds)
                    data = data[4:]
                await self._loop.sock_sendall(self._sock, data)
            except OSError as error:
                raise SandboxLost(f"the sandbox is gone: {error.strerror}") from error

    def expect(self, number: int) -> "asyncio.Future[int]":
        """The exit code of request `number`, when it comes; `SandboxLost` where it cannot come any more."""
        future: asyncio.Future[int] = self._loop.create_future()
        if self.open:
            self._waiting[number] = future
        else:
            future.set_exception(SandboxLost("the sandbox is gone"))
            future.exception()  # nobody may be waiting
        return future

    def expect_terminal(self, number: int) -> "asyncio.Future[tuple[int, int]]":
        """(pid, descriptor) of the terminal that request `number` opens; whoever awaits it owns the descriptor."""
        future: asyncio.Future[tuple[int, int]] = self._loop.create_future()
        self._terminals[number] = future
        return future

    def _read(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, 1 << 16, 4)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data:
            self.close()
            return
        self._buffer += data
        try:
            fds = self._take_messages(fds)
        except ValueError:
            self.close()  # nothing of ours speaks like that: whoever it is, it is not the init any more
        for fd in fds:
            os.close(fd)

    def _take_messages(self, fds: list[int]) -> list[int]:
        while len(self._buffer) >= 4:
            end = 4 + int.from_bytes(self._buffer[:4], "little")
            if end > _MOST_REPLY_BYTES:
                raise ValueError("a reply that large")
            if len(self._buffer) < end:
                break
            fields, self._buffer = fields_of(self._buffer[4:end]), self._buffer[end:]
            fds = self._hear(fields, fds)
        return fds

    def _hear(self, fields: list[bytes], fds: list[int]) -> list[int]:
        """Take one message; the descriptors it did not use."""
        if fields == [b"ready"] and not self.ready.done():
            self.ready.set_result(fds)
            return []
        if len(fields) == 3 and fields[0] == b"terminal" and fds:
            opened = self._terminals.pop(int(fields[1]), None)
            if opened is not None and not opened.done():
                opened.set_result((int(fields[2]), fds.pop(0)))
        if len(fields) == 3 and fields[0] == b"done":
            unopened = self._terminals.pop(int(fields[1]), None)
            if unopened is not None and not unopened.done():
                unopened.set_exception(SandboxLost("the sandbox has no terminal left"))
                unopened.exception()
            future = self._waiting.pop(int(fields[1]), None)
            if future is not None and not future.done():
                future.set_result(int(fields[2]))
        return fds

    def close(self) -> None:
        if not self.open:
            return
        self.open = False
        self._loop.remove_reader(self._sock)
        self._sock.close()
        waiting: list[asyncio.Future[Any]] = [self.ready, *self._waiting.values(), *self._terminals.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(SandboxLost("the sandbox ended"))
                future.exception()  # nobody may be waiting
        self._waiting.clear()


class WorkBox(abc.ABC):
    """Commands and files of a sandbox in which our init, or a process of its kind, takes orders."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env: dict[str, str] = {}
        self.use_env(env)

    @abc.abstractmethod
    async def _run(self, work: list[bytes], *, timeout_s: float, stdin: bytes, cap: int) -> ExecResult:
        """Have the order `work` done; raises `SandboxLost`."""

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
            return ExecResult(exit_code=CANNOT_START, stdout=b"", stderr=NO_COMMAND.encode() + b"\n")
        if private:
            work[0] = RUN_PRIVATELY
        return await self._run(work, timeout_s=timeout_s, stdin=stdin, cap=output_cap)

    def use_env(self, env: Mapping[str, str]) -> None:
        """What commands find in their environment from now on."""
        self._env = {**_BASE_ENV, **env}

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


class ProcessSandbox(WorkBox):
    """See `openforge.sandbox.contract.Sandbox`."""

    def __init__(
        self,
        sandbox_id: str,
        isolation: Literal["full", "reduced"],
        control: Control,
        groups: CommandGroups | None,
        env: Mapping[str, str],
        bury: "Callable[[ProcessSandbox], asyncio.Future[None]]",
    ) -> None:
        super().__init__(env)
        self.id = sandbox_id
        self.isolation = isolation
        self._control = control
        self._groups = groups
        self._bury = bury
        self._stopping: asyncio.Future[None] | None = None

    async def terminal(
        self,
        command: str | Sequence[str],
        *,
        rows: int = 24,
        cols: int = 80,
        cwd: str = "/workspace",
        env: Mapping[str, str] | None = None,
    ) -> Terminal:
        work = self._work(command, cwd, {"TERM": "xterm-256color", **(env or {})})
        if not work:
            raise ValueError(NO_COMMAND)
        number = self._control.number()
        ended, opened = self._control.expect(number), self._control.expect_terminal(number)
        inside: list[int] = []
        try:
            inside = self._kill_group(number)
            size = [b"%d" % within_window(length) for length in (rows, cols)]
            fields = [b"%d" % len(inside), *size, *self._marked(work, number)]
            await self._control.ask(b"terminal", number, fields, inside)
            pid, master = await opened
        except OSError as error:
            raise SandboxLost(f"the sandbox's control group is gone: {error.strerror}") from error
        except BaseException:
            self._end_terminal(number)
            raise
        finally:
            for fd in inside:
                os.close(fd)
        return ProcessTerminal(
            pid, master, ended, signal=lambda which: self._signal(number, which), end=lambda: self._end_terminal(number)
        )

    @property
    def alive(self) -> bool:
        return self._control.open and self._stopping is None

    async def kill_all(self) -> None:
        if self._groups:
            with contextlib.suppress(OSError):  # a group went with its last process
                self._groups.kill_commands()
        number = self._control.number()
        ended = self._control.expect(number)
        await self._control.ask(b"kill-all", number)
        try:
            async with asyncio.timeout(_DEATH_S):
                await ended
        except TimeoutError:
            raise SandboxLost(f"processes were still there {_DEATH_S:.0f} s after they were killed") from None

    async def stop(self) -> None:
        """Every caller waits for the same end."""
        if self._stopping is None:
            self._stopping = self._bury(self)
        await asyncio.shield(self._stopping)

    async def _run(self, work: list[bytes], *, timeout_s: float, stdin: bytes, cap: int) -> ExecResult:
        began = time.monotonic()
        number = self._control.number()
        kills_before = self._memory_kills()
        ended = self._control.expect(number)
        drains, feed = await self._begin(number, work, stdin, cap)
        try:
            code, timed_out = await self._await_end(number, ended, timeout_s)
            await asyncio.wait([drain.ended for drain in drains], timeout=_LINGER_S)
        except BaseException:
            self._kill(number)
            raise
        finally:
            feed.close()
            for drain in drains:
                drain.close()
            if self._groups:
                self._groups.close_command(number)
        out, err = drains
        return ExecResult(
            exit_code=TIMED_OUT if timed_out else code,
            stdout=out.data,
            stderr=err.data,
            truncated=out.truncated or err.truncated,
            timed_out=timed_out,
            out_of_memory=self._memory_kills() > kills_before,
            wall_s=time.monotonic() - began,
        )

    async def _begin(self, number: int, work: list[bytes], stdin: bytes, cap: int) -> tuple[list[Drain], Feed]:
        inside, outside = _pipes()
        try:
            inside += self._kill_group(number)
            await self._control.ask(b"start", number, [b"%d" % len(inside), *self._marked(work, number)], inside)
        except BaseException as error:
            for fd in outside:
                os.close(fd)
            if isinstance(error, OSError):
                raise SandboxLost(f"the sandbox's control group is gone: {error.strerror}") from error
            raise
        finally:
            for fd in inside:
                os.close(fd)
        return [Drain(outside[1], cap), Drain(outside[2], cap)], Feed(outside[0], stdin)

    def _kill_group(self, number: int) -> list[int]:
        """The way into a new kill group, where there are such; raises `OSError`."""
        return [self._groups.open_command(number)] if self._groups else []

    def _marked(self, work: list[bytes], number: int) -> list[bytes]:
        """Without kill groups, a command is known by what stands in its environment."""
        if self._groups or work[0] not in COMMANDS:
            return work
        return [*work, b"OPENFORGE_COMMAND=%d" % number]

    async def _signal(self, number: int, which: int) -> None:
        with contextlib.suppress(SandboxLost):  # then it has ended anyway
            await self._control.ask(b"signal", number, [b"%d" % which])

    def _end_terminal(self, number: int) -> None:
        self._kill(number)
        if self._groups:
            self._groups.close_command(number)

    async def _await_end(self, number: int, ended: "asyncio.Future[int]", timeout_s: float) -> tuple[int, bool]:
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(ended), False
        except TimeoutError:
            self._kill(number)
        try:
            async with asyncio.timeout(_DEATH_S):
                return await ended, True
        except TimeoutError:
            raise SandboxLost(f"a command was still there {_DEATH_S:.0f} s after it was killed") from None

    def _memory_kills(self) -> int:
        return self._groups.memory_kills() if self._groups else 0

    def _kill(self, number: int) -> None:
        if self._groups:
            with contextlib.suppress(OSError):  # the group went with its last process
                self._groups.kill_command(number)
        elif self._control.open:
            asking = asyncio.ensure_future(self._control.ask(b"kill", number))
            asking.add_done_callback(lambda done: done.cancelled() or done.exception())


def _pipes() -> tuple[list[int], list[int]]:
    """(stdin, stdout, stderr) for the command, and our ends of them."""
    stdin_read, stdin_write = os.pipe()
    stdout_read, stdout_write = os.pipe()
    stderr_read, stderr_write = os.pipe()
    return [stdin_read, stdout_write, stderr_write], [stdin_write, stdout_read, stderr_read]


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
