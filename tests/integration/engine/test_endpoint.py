"""Somebody else's endpoint in the place of an engine: a peer over the wire that takes its time."""

import asyncio

import httpx
import pytest

from openforge.bus.server import free_port
from openforge.endpoint import Address, Endpoint
from openforge.engine.endpoint import _app
from openforge.engine.http import Server, bind


async def test_a_call_for_which_nobody_waits_is_called_off() -> None:
    asked, called_off = asyncio.Event(), asyncio.Event()

    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        while await reader.read(1 << 16):
            pass
        called_off.set()
        writer.close()

    url = f"http://127.0.0.1:{free_port()}"
    peer = await asyncio.start_server(never_answer, "127.0.0.1", 0)
    theirs = f"http://127.0.0.1:{peer.sockets[0].getsockname()[1]}/v1"
    async with peer, Endpoint(Address(section="engine", url=theirs, model="m"), at_once=1) as endpoint:
        server = Server(_app(endpoint, asyncio.get_running_loop().create_future()))
        serving = asyncio.create_task(server.serve(sockets=[bind(url)]))
        try:
            async with httpx.AsyncClient(base_url=url, timeout=30) as client:
                call = asyncio.create_task(client.post("/v1/chat/completions", json={"messages": []}))
                await asyncio.wait_for(asked.wait(), 20)
                assert not called_off.is_set()
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
            await asyncio.wait_for(called_off.wait(), 20)
        finally:
            server.should_exit = True
            await serving
