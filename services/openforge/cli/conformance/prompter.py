"""Stands between proxy and engine and tells the engine what to say.

Promises: it speaks the engine's own wire on both sides and changes one field, `forced_token_ids`; what the engine
answers passes as it comes.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import httpx
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from openforge.cli.conformance.script import Script
from openforge.wire.generate import GenerateRequest

GENERATE = "/inference/v1/generate"


class Prompter:
    """`url` is where the proxy finds it; `engine_url` is set as soon as that is known."""

    def __init__(self, script: Script) -> None:
        self.engine_url = ""
        self._script = script
        self._client = httpx.AsyncClient(timeout=None)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        app = Starlette(routes=[Route(GENERATE, self._generate, methods=["POST"])])
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
        server = _Server(config)
        task = asyncio.create_task(server.serve(sockets=[self._socket]))
        try:
            yield
        finally:
            server.should_exit = True
            await task
            await self._client.aclose()

    async def _generate(self, http: Request) -> Response:
        asked = msgspec.json.decode(await http.body(), type=GenerateRequest)
        asked.sampling_params.forced_token_ids = self._script.reply(asked.token_ids)
        request = self._client.build_request("POST", self.engine_url + GENERATE, content=msgspec.json.encode(asked))
        try:
            answer = await self._client.send(request, stream=True)
        except httpx.TransportError as error:
            return Response(f"the engine is away: {error}", status_code=503)
        return StreamingResponse(
            _relayed(answer), status_code=answer.status_code, media_type=answer.headers.get("content-type")
        )


async def _relayed(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Closed with the client: then the engine's work is called off."""
    try:
        async for piece in answer.aiter_raw():
            yield piece
    finally:
        await answer.aclose()


class _Server(uvicorn.Server):
    """Signals are the command's business."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
