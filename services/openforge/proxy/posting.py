"""POST over kept connections, the answer's body as it comes.

Promises: a connection carries one call at a time and is kept only after a whole answer; leaving an answer early closes
its connection, which tells the server; a kept connection that the server has closed meanwhile costs nothing.
A general client spends more time on a call than the rest of the proxy does.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import httptools

CONNECT_TIMEOUT_S = 5.0


class Broken(Exception):
    """No connection, or it ended or fell silent in the middle of an answer."""


class Answer:
    """`status` is there at once, the body comes with `next`."""

    def __init__(self, line: "_Line", silence_s: float) -> None:
        self.status = line.status
        self._line = line
        self._silence_s = silence_s

    async def next(self) -> bytes | None:
        """What came of the body since, None after all of it."""
        return await self._line.next(self._silence_s)

    async def read(self) -> bytes:
        pieces: list[bytes] = []
        while (piece := await self.next()) is not None:
            pieces.append(piece)
        return b"".join(pieces)


class Posting:
    """Calls to one server, `host` and `port`."""

    def __init__(self, host: str, port: int, silence_s: float) -> None:
        self._host = host
        self._port = port
        self._silence_s = silence_s
        self._kept: list[_Line] = []

    @asynccontextmanager
    async def post(self, path: str, body: bytes) -> AsyncIterator[Answer]:
        """Raises `Broken`, then or while the pieces come."""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        line = await self._asked(head.encode() + body)
        try:
            yield Answer(line, self._silence_s)
        finally:
            if line.whole and not line.closed:
                self._kept.append(line)
            else:
                line.close()

    async def _asked(self, request: bytes) -> "_Line":
        """A connection on which the answer has begun."""
        while self._kept:
            line = self._kept.pop()
            line.ask(request)
            try:
                await line.begun(self._silence_s)
            except Broken:
                if line.heard:
                    raise
            else:
                return line
        line = await self._connected()
        line.ask(request)
        await line.begun(self._silence_s)
        return line

    async def _connected(self) -> "_Line":
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, line = await asyncio.get_running_loop().create_connection(_Line, self._host, self._port)
        except (OSError, TimeoutError) as error:
            raise Broken(f"no connection to {self._host}:{self._port}: {error or 'timed out'}") from error
        return line

    def close(self) -> None:
        while self._kept:
            self._kept.pop().close()


class _Line(asyncio.Protocol):
    """One connection. `heard`: something of the present answer arrived; `whole`: all of it."""

    def __init__(self) -> None:
        self.closed = False
        self.heard = self.whole = False
        self.status = 0
        self._body: list[bytes] = []
        self._why = "the connection was closed"
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._waiting: asyncio.Future[None] | None = None

    def ask(self, request: bytes) -> None:
        self.heard = self.whole = False
        self.status = 0
        self._body.clear()
        self._parser = httptools.HttpResponseParser(self)
        if self._transport is not None and not self.closed:
            self._transport.write(request)

    async def begun(self, silence_s: float) -> None:
        """Wait for status and headers."""
        while not self.status:
            await self._news(silence_s)

    async def next(self, silence_s: float) -> bytes | None:
        """What came of the body since, None after all of it."""
        while not self._body:
            if self.whole:
                return None
            await self._news(silence_s)
        came = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        return came

    async def _news(self, silence_s: float) -> None:
        if self.closed:
            raise Broken(self._why)
        loop = asyncio.get_running_loop()
        self._waiting = loop.create_future()
        alarm = loop.call_later(silence_s, self._give_up, f"nothing was heard for {silence_s:g} s")
        try:
            await self._waiting
        finally:
            alarm.cancel()
            self._waiting = None

    def _give_up(self, why: str) -> None:
        self._why = why
        self.close()
        self._wake()

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    # -- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            self.close()  # nobody asked
            return
        self.heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._why = f"what came is no HTTP answer: {error}"
            self.close()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if exc is not None:
            self._why = f"the connection broke: {exc}"
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    # -- called by the parser

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        self.whole = True
        if not self._parser.should_keep_alive():
            self.close()
