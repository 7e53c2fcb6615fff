"""The proxy's life: listen, seal what ended, drain."""

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, closing, contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from openforge.bus import CAUGHT_UP, BadSettings, Bus, Told
from openforge.chat.chatml import BadTokenizer
from openforge.chat.contract import Renderer
from openforge.chat.renderers import UnknownRenderer, load_renderer
from openforge.protos import KEY_BUCKET, EpisodeEnded, EpisodeSealed, Fact
from openforge.proxy.app import make_app
from openforge.proxy.bounds import Bounded
from openforge.proxy.context import Context
from openforge.proxy.desk import Desk
from openforge.proxy.desks import Desks
from openforge.proxy.foreign import Foreign, NoTokens
from openforge.proxy.keys import Keys
from openforge.proxy.listening import BACKLOG, listen, shared, socket_path, take_over
from openforge.proxy.policy import Policy
from openforge.proxy.settings import Settings
from openforge.proxy.upstream import Engine
from openforge.runs import RunConfig, submitted_config
from openforge.runs.model import model_folder
from openforge.service import cancel, health, log

_ACK_WAIT_S = 10.0
"""How long an end waits for its seal when the proxy died over it."""
_THREADS = min(4, os.cpu_count() or 1)
"""Those that tokenise: more than there are cores win nothing, and each keeps memory of its own."""
_COLLECT_AFTER = (20_000, 10, 100)
_KEEP_ALIVE_S = 600
"""Longer than any tool runs: a connection that we close first may cost the harness a call."""


async def serve(settings: Settings, bus: Bus, stop: asyncio.Event) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS))
    health.not_ready(waiting_for="the run")
    config, _ = await submitted_config(bus, settings.run)
    renderer = _renderer(config)
    sockets = listen(settings)
    fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    path = socket_path(settings)
    async with _asking(settings, config) as (engine, foreign):
        context = Context(settings, config, renderer, engine, Policy(), bus, fatal, foreign)
        desks = Desks(lambda episode, attempt: Desk(context, episode, attempt), shared=shared(settings))
        app = make_app(context, Keys(await bus.bucket(KEY_BUCKET), settings.run), desks)
        app = Bounded(app, at_once=settings.proxy_at_once, client_s=settings.proxy_client_s)
        server = _Server(_http(app, settings))
        serving = asyncio.create_task(server.serve(sockets=sockets))
        background = [
            asyncio.create_task(context.policy.follow(bus, settings.run)),
            asyncio.create_task(_seal(bus, settings.run, desks)),
        ]
        if shared(settings):
            background.append(asyncio.create_task(_follow_ends(bus, settings.run, desks)))
            background += [asyncio.create_task(take_over(path))] if path else []
        _collect_less()
        health.ready(waiting_for="")
        log.info("listening", url=settings.proxy_url, socket=str(path or ""))
        stopping = asyncio.create_task(stop.wait())
        watched: set[asyncio.Future[Any]] = {stopping, serving, fatal, *background}
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await desks.drain(settings.proxy_drain_s)
        await serving
        await cancel(*background, stopping, again_s=1.0)
    for task in (fatal, *background):
        if task.done() and not task.cancelled():
            task.result()


@asynccontextmanager
async def _asking(settings: Settings, config: RunConfig) -> AsyncIterator[tuple[Engine, Foreign | None]]:
    """The engine, and in its place the endpoint that the run names."""
    with closing(Engine(settings.engine_url, settings.engine_silence_s)) as engine:
        if config.engine.kind != "endpoint":
            yield engine, None
            return
        async with aclosing(Foreign(settings.engine_url)) as foreign:
            yield engine, foreign


async def _seal(bus: Bus, run: str, desks: Desks) -> None:
    """Close the desk of every attempt that ended, and say what there is."""

    async def seal(told: Told[EpisodeEnded]) -> AsyncIterator[Fact]:
        episode, attempt = told.fact.episode, told.fact.attempt
        if await bus.is_told(EpisodeSealed, run, episode, attempt):
            desks.sealed(episode, attempt)
            return
        desk = await desks.of(episode, attempt)
        sealed = await desk.close()
        yield sealed
        desks.sealed(episode, attempt)
        log.info("episode sealed", episode=episode, attempt=attempt, turns=len(sealed.turns), refused=sealed.refused)

    await bus.work(service="proxy", fact=EpisodeEnded, handler=seal, run=run, in_flight=16, ack_wait_s=_ACK_WAIT_S)


async def _follow_ends(bus: Bus, run: str, desks: Desks) -> None:
    """Whichever proxy seals an attempt, all of them have to stop working at it."""
    async for told in bus.follow(("episode",), run=run):
        if told is CAUGHT_UP:
            continue
        match told.fact:
            case EpisodeEnded(episode=episode, attempt=attempt):
                await desks.ended(episode, attempt)
            case EpisodeSealed(episode=episode, attempt=attempt):
                desks.sealed(episode, attempt)


def _collect_less() -> None:
    """What is there now stays, and hardly anything that a call makes is in a cycle: to look for those costs a call more
    than to write its record.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)


def _renderer(config: RunConfig) -> Renderer:
    if config.engine.kind == "endpoint":
        return NoTokens()
    try:
        return load_renderer(config.model.renderer, model_folder(config.model.path))
    except (UnknownRenderer, BadTokenizer, FileNotFoundError) as error:
        raise BadSettings(str(error)) from error


def _http(app: ASGIApp, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        ws="none",
        lifespan="off",
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        server_header=False,
        timeout_graceful_shutdown=int(settings.proxy_drain_s) + 5,
        backlog=BACKLOG,
    )


class _Server(uvicorn.Server):
    """Signals are the service's business."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
