"""An endpoint that we do not serve, in the place of an engine: its calls go through here, where the key is.

Promises: it is told as served only after it took the key and has the model; at most `engine.max_requests` calls are
open at once, and none goes on for which nobody waits; calls that may work later are made again; a key or a model that
it refuses ends the process and says so.
"""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from fastapi import FastAPI, Request, Response

from openforge.bus import AlreadyTold, BadSettings, Bus
from openforge.endpoint import Address, BadEndpoint, Endpoint, EndpointBroken, EndpointRefused
from openforge.engine.http import Server, bind
from openforge.engine.settings import Settings
from openforge.protos import PolicyServed
from openforge.runs import RunConfig
from openforge.service import health, log

DIGEST = "endpoint"
_LOOK_EVERY_S = 0.25
_NOBODY_WAITS = 499


class NobodyWaits(Exception):
    """A call may cost money, and its answer would be read by nobody."""


async def serve_endpoint(settings: Settings, bus: Bus, config: RunConfig, name: str) -> None:
    """Until it is cancelled; raises `BadSettings` where the endpoint takes no call."""
    try:
        async with Endpoint(address_of(config), at_once=config.engine.max_requests) as endpoint:
            await endpoint.check()
            await _relay(settings, bus, endpoint, name)
    except BadEndpoint as error:
        raise BadSettings(str(error)) from error


def address_of(config: RunConfig) -> Address:
    engine = config.engine
    return Address(section="engine", url=engine.url, model=engine.model, key_env=engine.key_env)


async def _relay(settings: Settings, bus: Bus, endpoint: Endpoint, name: str) -> None:
    died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    server = Server(_app(endpoint, died))
    serving = asyncio.create_task(server.serve(sockets=[bind(settings.engine_url)]))
    try:
        await _tell_served(settings, bus, name)
        log.info("endpoint served", url=endpoint.address.url, model=endpoint.address.model)
        health.ready(waiting_for="", url=endpoint.address.url, model=endpoint.address.model)
        await died
    finally:
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await serving


async def _tell_served(settings: Settings, bus: Bus, name: str) -> None:
    served = PolicyServed(
        run=settings.run, version=0, incarnation=0, engine=name, digest=DIGEST, probe_error=0.0, load_s=0.0
    )
    with contextlib.suppress(AlreadyTold):
        await bus.tell(served)


async def _while_waited_for(request: Request, chat: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """Raises `NobodyWaits`, and calls the endpoint off, where who asked went away."""
    call = asyncio.create_task(chat)
    try:
        while not (await asyncio.wait((call,), timeout=_LOOK_EVERY_S))[0]:
            if await request.is_disconnected():
                raise NobodyWaits
        return await call
    finally:
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


def _app(endpoint: Endpoint, died: "asyncio.Future[None]") -> FastAPI:
    app = FastAPI(openapi_url=None)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        try:
            return await _while_waited_for(request, endpoint.chat(await request.json()))
        except BadEndpoint as error:
            if not died.done():
                died.set_exception(error)
            return Response(str(error), status_code=503)
        except EndpointBroken as error:
            return Response(str(error), status_code=503)
        except EndpointRefused as error:
            return Response(f"{error.code} {error}".strip(), status_code=error.status)
        except NobodyWaits:
            return Response(status_code=_NOBODY_WAITS)

    @app.get("/health")
    async def up() -> Response:
        return Response(status_code=503 if died.done() else 200)

    @app.get("/weight_info")
    async def weight_info() -> dict[str, str]:
        return {"weight_version": DIGEST}

    return app
