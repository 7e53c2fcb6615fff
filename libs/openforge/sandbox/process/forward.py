"""The one way out of a sandbox: its loopback port, carried to the model proxy's UNIX socket.

The listening socket was opened inside the sandbox's network and handed out, so nothing inside can be
killed or replaced to change where it leads. A proxy that is away for a moment is waited for.
"""

import asyncio
import contextlib
import socket
from pathlib import Path

_MOST_CONNECTIONS = 256
_CHUNK = 1 << 16
PATIENCE_S = 60.0
"""How long a connection waits for a proxy that is being started again."""


class Forwarder:
    def __init__(self, target: Path) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, listening: socket.socket) -> None:
        listening.setblocking(False)
        self._server = await asyncio.start_server(self._accept, sock=listening)

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= _MOST_CONNECTIONS:
            writer.close()
            return
        self._connections.add(task)
        try:
            await self._carry(reader, writer)
        except (OSError, asyncio.CancelledError):
            return  # either side is gone; the other learns it by the close
        finally:
            self._connections.discard(task)
            writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await connected(self._target)
        try:
            back = asyncio.create_task(_pump(there_reader, writer))
            try:
                await _pump(reader, there_writer)
                await back
            finally:
                back.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError):
                    await back
        finally:
            there_writer.close()


async def connected(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the socket, as soon as somebody listens there; raises `OSError` when that takes too long."""
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while True:
        try:
            return await asyncio.open_unix_connection(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(0.05)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
