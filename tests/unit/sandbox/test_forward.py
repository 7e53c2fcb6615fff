"""The way out of a sandbox, when the proxy is away for a moment."""

import asyncio
import time
from pathlib import Path

import pytest

from openforge.sandbox.process import forward
from openforge.sandbox.process.forward import connected


async def _greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"here")
    await writer.drain()
    writer.close()


async def test_a_connection_waits_for_a_proxy_that_is_being_started_again(tmp_path: Path) -> None:
    path = tmp_path / "proxy.sock"
    first = await asyncio.start_unix_server(_greet, path)
    first.close()
    await first.wait_closed()  # the dead proxy's socket may still be there: nobody listens on it
    waiting = asyncio.create_task(connected(path))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    path.unlink(missing_ok=True)
    async with await asyncio.start_unix_server(_greet, path):
        reader, writer = await waiting
        assert await reader.read() == b"here"
        writer.close()


async def test_a_proxy_that_does_not_come_back_ends_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "PATIENCE_S", 0.2)
    began = time.monotonic()
    with pytest.raises(OSError, match=r"proxy\.sock|No such file"):
        await connected(tmp_path / "proxy.sock")
    assert time.monotonic() - began >= 0.2
