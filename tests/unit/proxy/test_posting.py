"""Calls over kept connections, against a server that sends exactly what a test says."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from openforge.bus.server import free_port
from openforge.proxy.posting import Broken, Posting

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
WHOLE = HEAD + b"3\r\nabc\r\n0\r\n\r\n"


class Server:
    """Answers the n-th request of all with the n-th script; None closes the connection. Counts connections."""

    def __init__(self, scripts: list[list[bytes | None]]) -> None:
        self.scripts = scripts
        self.connections = 0
        self.open = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while await reader.read(4096) and self.scripts and await self._say(self.scripts.pop(0), writer):
                continue
        except ConnectionError:
            pass
        finally:
            self.open -= 1
            writer.close()

    async def _say(self, script: list[bytes | None], writer: asyncio.StreamWriter) -> bool:
        for piece in script:
            if piece is None:
                return False
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        return True

    async def all_gone(self) -> None:
        async with asyncio.timeout(5):
            while self.open:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def posting(*scripts: list[bytes | None], silence_s: float = 5.0) -> AsyncIterator[tuple[Posting, Server]]:
    answering = Server(list(scripts))
    server = await asyncio.start_server(answering, "127.0.0.1", 0)
    calls = Posting("127.0.0.1", server.sockets[0].getsockname()[1], silence_s)
    yield calls, answering
    calls.close()
    await answering.all_gone()
    server.close()
    await server.wait_closed()


async def read(calls: Posting) -> tuple[int, bytes]:
    async with calls.post("/x", b"{}") as answer:
        return answer.status, await answer.read()


async def test_an_answer_may_come_in_any_pieces() -> None:
    bytewise: list[bytes | None] = [WHOLE[at : at + 7] for at in range(0, len(WHOLE), 7)]
    async with posting(bytewise, [b"HTTP/1.1 503 Busy\r\nContent-Length: 2\r\n\r\nno"]) as (calls, server):
        assert await read(calls) == (200, b"abc")
        assert await read(calls) == (503, b"no")
        assert server.connections == 1


async def test_a_kept_connection_that_was_closed_meanwhile_costs_nothing() -> None:
    async with posting([WHOLE], [None], [WHOLE]) as (calls, server):
        assert await read(calls) == (200, b"abc")
        assert await read(calls) == (200, b"abc")
        assert server.connections == 2


async def test_calls_at_once_have_connections_of_their_own() -> None:
    async with posting([WHOLE], [WHOLE], [WHOLE]) as (calls, server):
        assert await asyncio.gather(*(read(calls) for _ in range(3))) == [(200, b"abc")] * 3
        assert server.connections == 3


@pytest.mark.parametrize("script", [[HEAD, b"3\r\nab", None], [HEAD[:20], None], [b"SSH-2.0-hello\r\n", None]])
async def test_half_an_answer_is_broken(script: list[bytes | None]) -> None:
    async with posting(script) as (calls, _):
        with pytest.raises(Broken):
            await read(calls)


async def test_silence_is_broken() -> None:
    async with posting([HEAD], silence_s=0.1) as (calls, _):
        with pytest.raises(Broken, match="nothing was heard"):
            await read(calls)


async def test_nobody_there_is_broken() -> None:
    calls = Posting("127.0.0.1", free_port(), 1.0)
    with pytest.raises(Broken, match="no connection"):
        await read(calls)


async def test_leaving_early_closes_the_connection() -> None:
    async with posting([HEAD + b"3\r\nabc\r\n"]) as (calls, server):
        async with calls.post("/x", b"{}") as answer:
            assert await answer.next() == b"abc"
        await server.all_gone()
