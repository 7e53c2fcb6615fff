"""A listening socket of a sandbox, served from outside.

Promises: no more connections at once than a host can carry; one that breaks costs nobody but itself; `stop` ends all.
"""

import abc
import asyncio
import socket

MOST_HEAD_BYTES = 1 << 16
_MOST_CONNECTIONS = 256
_CHUNK = 1 << 16


class Door(abc.ABC):
    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @abc.abstractmethod
    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, which is closed afterwards."""

    async def start(self, listening: socket.socket) -> None:
        listening.setblocking(False)
        self._server = await asyncio.start_server(self._accept, sock=listening, limit=MOST_HEAD_BYTES)

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
            await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError):
            return  # either side is gone, or talks what nobody understands; the other learns it by the close
        finally:
            self._connections.discard(task)
            writer.close()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
