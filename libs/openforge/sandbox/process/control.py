"""The socket to the init of a sandbox: numbered requests with descriptors out, numbered ends back.

Promises: who waits for an end gets it, or `SandboxLost` where it cannot come any more; what does not speak like our
init is hung up on.
"""

import asyncio
import os
import socket
from collections.abc import Sequence
from typing import Any

from openforge.sandbox.contract import SandboxLost
from openforge.sandbox.inside.frames import fields_of, frame

_MOST_REQUEST_BYTES = 4 << 20
_MOST_REPLY_BYTES = 4096


class Control:
    """One such socket."""

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
