"""The line between the harnesses and the proxy, which breaks when it is told to.

Promises: without faults every byte passes as it came, one connection to the proxy for each request; a fault strikes
one request and is counted; a request that is not struck reaches the proxy exactly once.
"""

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from pathlib import Path

import msgspec

from openforge.harnesses import Harness, find
from openforge.harnesses.harness import mark
from openforge.sandbox.process.forward import connected

_HEAD_MOST = 1 << 20
_CHUNK = 1 << 16
SLOW_S = 4.0
_AT_WORK_S = 0.02
_MARKED = re.compile(re.escape(mark("HARNESS", "faults")).replace("HARNESS", r"(\S+)").encode())
_CALL = re.compile(
    rb"POST /ep/(?P<episode>[^/. ]+)\S*?(?:/chat/completions|/responses|/messages|[gG]enerateContent)[? ]"
)


class Fault(StrEnum):
    """What happens to one model call."""

    NONE = "none"
    """Nothing."""
    ERROR = "error_500"
    """It never reaches the proxy: the harness is told 500."""
    CUT = "cut_before_answer"
    """The proxy has it, and the harness's connection is cut before any byte of the answer."""
    DROP = "cut_in_answer"
    """The connection is cut in the middle of the answer."""
    SLOW = "slow_headers"
    """The answer's first byte is late."""
    TWICE = "sent_twice"
    """The proxy gets it twice at the same time; the harness sees one answer."""
    KILL = "proxy_killed"
    """The proxy is killed while it works on it."""


PLAN = (
    Fault.ERROR,
    Fault.NONE,
    Fault.CUT,
    Fault.NONE,
    Fault.DROP,
    Fault.NONE,
    Fault.SLOW,
    Fault.TWICE,
    Fault.KILL,
)
"""What strikes the calls of a `faults` episode, in their order; later ones pass."""


def plan_for(harness: Harness) -> tuple[Fault, ...]:
    """The plan without what the harness does not survive by its own decision."""
    return tuple(fault for fault in PLAN if fault.value not in harness.fatal)


class Request(msgspec.Struct, frozen=True):
    head: bytes
    body: bytes

    @property
    def bytes(self) -> bytes:
        return self.head + self.body


class Line:
    """Listens at `socket` and leads to `proxy`, both UNIX sockets; `kill` ends the proxy, which somebody restarts.

    `struck` says by episode how often what happened.
    """

    def __init__(self, socket: Path, proxy: Path, kill: Callable[[], None]) -> None:
        self.struck: dict[str, Counter[Fault]] = defaultdict(Counter)
        self._socket = socket
        self._proxy = proxy
        self._kill = kill
        self._asides: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        self._socket.parent.mkdir(parents=True, exist_ok=True)
        self._socket.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._serve, self._socket, limit=_HEAD_MOST)
        self._socket.chmod(0o666)
        try:
            yield
        finally:
            server.close()
            for aside in self._asides:
                aside.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request and its answer; every answer closes the connection."""
        try:
            request = await read_request(reader)
            if request is not None:
                await self._strike(self._fault(request), request, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # either side went away
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def _fault(self, request: Request) -> Fault:
        found, marked = _CALL.match(request.head), _MARKED.search(request.body)
        if found is None or marked is None:
            return Fault.NONE
        struck = self.struck[found["episode"].decode()]
        plan = plan_for(find(marked[1].decode()))
        fault = plan[struck.total()] if struck.total() < len(plan) else Fault.NONE
        struck[fault] += 1
        return fault

    async def _strike(self, fault: Fault, request: Request, writer: asyncio.StreamWriter) -> None:
        match fault:
            case Fault.ERROR:
                writer.write(_ERROR)
                await writer.drain()
                return
            case Fault.TWICE:
                self._aside(request)
            case Fault.SLOW:
                await asyncio.sleep(SLOW_S)
        async with self._asked(request) as answer:
            if fault is Fault.KILL:
                await asyncio.sleep(_AT_WORK_S)
                self._kill()
            async for piece in _pieces(answer):
                if fault in (Fault.CUT, Fault.KILL):
                    break
                await self._pass(piece if fault is not Fault.DROP else _half(piece), writer)
                if fault is Fault.DROP and _has_body(piece):
                    break
        if fault in (Fault.CUT, Fault.DROP, Fault.KILL):
            writer.transport.abort()

    async def _pass(self, piece: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(piece)
        await writer.drain()

    def _aside(self, request: Request) -> None:
        """The same request once more; nobody reads what comes back."""

        async def ask() -> None:
            async with self._asked(request) as answer:
                async for _ in _pieces(answer):
                    pass

        task = asyncio.create_task(ask())
        self._asides.add(task)
        task.add_done_callback(self._asides.discard)

    @asynccontextmanager
    async def _asked(self, request: Request) -> AsyncIterator[asyncio.StreamReader]:
        answer, upstream = await connected(self._proxy)
        try:
            upstream.write(request.bytes)
            await upstream.drain()
            yield answer
        finally:
            upstream.close()


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    """One whole request, its connection marked as used once; None where there is none."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    lines = [line for line in head[:-4].split(b"\r\n") if not line.lower().startswith((b"connection:", b"expect:"))]
    once = b"\r\n".join([*lines, b"Connection: close"]) + b"\r\n\r\n"
    return Request(once, await _body(head.lower(), reader))


async def _body(head: bytes, reader: asyncio.StreamReader) -> bytes:
    if b"\r\ntransfer-encoding: chunked" in head:
        return await _chunks(reader)
    length = re.search(rb"\r\ncontent-length: *(\d+)", head)
    return await reader.readexactly(int(length[1])) if length else b""


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    """As they came, chunk heads and all."""
    pieces = []
    while True:
        size = await reader.readuntil(b"\r\n")
        data = await reader.readexactly(int(size.split(b";")[0], 16) + 2)
        pieces += [size, data]
        if len(data) == 2:
            return b"".join(pieces)


async def _pieces(answer: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await answer.read(_CHUNK):
        yield piece


def _has_body(piece: bytes) -> bool:
    """Whether something is left of it after the head of an answer."""
    return bool(piece.partition(b"\r\n\r\n")[2]) if piece.startswith(b"HTTP/") else True


def _half(piece: bytes) -> bytes:
    """An answer's head and half of what comes with it."""
    head, gap, body = piece.partition(b"\r\n\r\n") if piece.startswith(b"HTTP/") else (b"", b"", piece)
    return head + gap + body[: len(body) // 2]


_BODY = b'{"error": {"type": "api_error", "message": "the line is broken"}}'
_ERROR = (
    b"HTTP/1.1 500 Internal Server Error\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: "
    + str(len(_BODY)).encode()
    + b"\r\n\r\n"
    + _BODY
)
