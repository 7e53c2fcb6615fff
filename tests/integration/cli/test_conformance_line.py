"""The line between harness and proxy: what passes, and what each fault does to a call."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from openforge.cli.conformance import line as lines
from openforge.cli.conformance.line import PLAN, Fault, Line
from openforge.harnesses import find
from openforge.harnesses.harness import mark

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: one\n\ndata: two\n\n"


class Proxy:
    """Keeps what reaches it and answers everything alike."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.killed = 0

    def kill(self) -> None:
        self.killed += 1

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.requests.append(
            head + await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split()[0]))
        )
        writer.write(ANSWER)
        await writer.drain()
        writer.close()


@asynccontextmanager
async def standing(folder: Path) -> AsyncIterator[tuple[Line, Proxy]]:
    proxy = Proxy()
    server = await asyncio.start_unix_server(proxy.serve, folder / "proxy.sock")
    line = Line(folder / "line" / "proxy.sock", folder / "proxy.sock", proxy.kill)
    async with server, line.open():
        yield line, proxy


def call(scenario: str) -> bytes:
    body = b'{"messages": "' + mark("pi", scenario).encode() + b'"}'
    head = (
        b"POST /ep/e1.0/v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: keep-alive\r\nContent-Length: %d\r\n\r\n"
    )
    return head % len(body) + body


async def sent(folder: Path, request: bytes) -> bytes:
    """Everything that comes back until the connection ends, however it ends."""
    reader, writer = await asyncio.open_unix_connection(folder / "line" / "proxy.sock")
    writer.write(request)
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_without_faults_every_byte_of_body_and_answer_passes(tmp_path: Path) -> None:
    async with standing(tmp_path) as (line, proxy):
        assert await sent(tmp_path, call("plain")) == ANSWER
    assert proxy.requests[0].partition(b"\r\n\r\n")[2] == call("plain").partition(b"\r\n\r\n")[2]
    assert line.struck == {}


async def test_a_body_in_chunks_passes_as_it_came(tmp_path: Path) -> None:
    body = b"5\r\nhello\r\n1;x=y\r\n!\r\n0\r\n\r\n"
    reader = asyncio.StreamReader()
    reader.feed_data(b"POST /ep/e1.0/v1/messages HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
    request = await lines.read_request(reader)
    assert request is not None
    assert request.body == body


async def test_each_call_of_a_faulty_job_is_struck_as_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "SLOW_S", 0.05)
    answers: list[bytes] = []
    reached: list[int] = []
    async with standing(tmp_path) as (line, proxy):
        for _ in range(len(PLAN) + 1):
            before = len(proxy.requests)
            answers.append(await sent(tmp_path, call("faults")))
            await asyncio.sleep(0.05)
            reached.append(len(proxy.requests) - before)
    by_fault = dict(zip(PLAN, zip(answers, reached, strict=True), strict=False))
    assert by_fault[Fault.ERROR][0].startswith(b"HTTP/1.1 500 ")
    assert by_fault[Fault.ERROR][1] == 0
    assert by_fault[Fault.CUT] == (b"", 1)
    assert by_fault[Fault.DROP][1] == 1
    assert by_fault[Fault.DROP][0] in (ANSWER[: -len(b"data: two\n\n")], b"")  # a cut may take what was under way
    assert by_fault[Fault.SLOW] == (ANSWER, 1)
    assert by_fault[Fault.TWICE] == (ANSWER, 2)
    assert by_fault[Fault.KILL] == (b"", 1)
    assert proxy.killed == 1
    assert (answers[-1], reached[-1]) == (ANSWER, 1)
    assert line.struck["e1"].total() == len(PLAN) + 1


def test_a_harness_is_not_struck_by_what_it_gives_up_at() -> None:
    assert Fault.DROP in lines.plan_for(find("pi"))
    assert Fault.DROP not in lines.plan_for(find("qwen-code"))
