"""A TCP proxy that can break as networks do: cut, silent, or deaf in one direction."""

import asyncio
from contextlib import suppress


class FlakyNetwork:
    """Listens on `port` and forwards to `target_port`, both on loopback."""

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._cut = False
        self._swallow_answers = False
        self._marker, self._passes = b"", 0
        self.held = asyncio.Event()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self.cut()
        if self._server:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Every connection ends, new ones end at once."""
        self._cut = True
        for writer in list(self._writers):
            writer.transport.abort()

    def heal(self) -> None:
        """For connections that come from now on."""
        self._cut = self._swallow_answers = False
        self._marker = b""
        self.held.clear()

    def swallow_answers(self) -> None:
        """What clients say arrives, what they are told does not."""
        self._swallow_answers = True

    def hold_at(self, marker: bytes, passes: int = 0) -> None:
        """After so many of them have passed, whoever says `marker` is no longer heard; `held` is set then."""
        self._marker, self._passes = marker, passes

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._cut:
            writer.transport.abort()
            return
        try:
            there = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, there[1]}
        for pump in (self._pump(reader, there[1], answers=False), self._pump(there[0], writer, answers=True)):
            task = asyncio.ensure_future(pump)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool) -> None:
        try:
            with suppress(OSError):
                while data := await reader.read(65536):
                    if answers and self._swallow_answers:
                        continue
                    if not answers and self._marker and (found := data.count(self._marker)):
                        if found > self._passes:
                            self.held.set()
                            await asyncio.Event().wait()
                        self._passes -= found
                    writer.write(data)
                    await writer.drain()
        finally:
            self._writers.discard(writer)
            writer.transport.abort()
