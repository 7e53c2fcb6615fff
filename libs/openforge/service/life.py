"""The life of a service process: settings, logs, bus, signals, health, exit code.

Promises: SIGTERM and SIGINT ask it to stop, the second one ends it at once; its exit code says why it ended: 0
stopped cleanly, 1 a bug or a lost bus, 2 bad settings, 3 a zombie whose work somebody else does, which must not
be started again; with `OPENFORGE_DIE_WITH_PARENT=1` it does not outlive its parent.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from typing import Any, NoReturn, TypeVar

import msgspec

from openforge.bus import BadSettings, Bus, BusError, BusSettings, Zombie
from openforge.ending import cancel, die_with_parent
from openforge.service.health import health
from openforge.service.log import log, set_up_logs
from openforge.service.metrics import PROCESS, Process, set_up_metrics
from openforge.service.settings import settings_from_env
from openforge.service.tracing import set_up_traces

OK, FAILED, BAD_SETTINGS, ZOMBIE = 0, 1, 2, 3

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")
Serve = Callable[[S, Bus, asyncio.Event], Awaitable[None]]


def run_service(name: str, settings: type[S], serve: Serve[S]) -> NoReturn:
    """`serve(settings, bus, stop)` returns soon after `stop` is set. Never returns; exits with the code."""
    sys.exit(service_exit_code(name, settings, serve))


def service_exit_code(name: str, settings: type[S], serve: Serve[S]) -> int:
    set_up_logs(name, level=os.environ.get("OPENFORGE_LOG_LEVEL") or "info")
    if os.environ.get("OPENFORGE_DIE_WITH_PARENT") == "1":
        die_with_parent()
    try:
        own, bus = settings_from_env(settings), BusSettings.from_env()
    except BadSettings as error:
        log.error("bad settings", why=str(error))
        return BAD_SETTINGS
    send_traces = set_up_traces(name)
    health.begin(name, os.environ.get("OPENFORGE_HEALTH_FILE", ""))
    try:
        asyncio.run(_live(name, own, bus, serve))
    except BaseException as error:  # the boundary: what ends a process is said in its last line
        return _last_line(error)
    finally:
        send_traces()
    log.info("stopped")
    return OK


async def _live(name: str, settings: S, bus_settings: BusSettings, serve: Serve[S]) -> None:
    stop = asyncio.Event()
    listen_for_signals(stop)
    async with AsyncExitStack() as stack:
        bus = await _unless(stop, _reach(stack, bus_settings, name))
        if bus is None:
            return
        log.info("started", pid=os.getpid(), nats=bus_settings.url)
        aside = [asyncio.create_task(health.keep_writing()), *_count(name, stack)]
        asyncio.get_running_loop().call_soon(health.begun)  # not before the service has begun
        try:
            await serve(settings, bus, stop)
        finally:
            for task in aside:
                task.cancel()
            health.not_ready(ended=True)


def _count(name: str, stack: AsyncExitStack) -> Iterator[asyncio.Task[None]]:
    """The process's own numbers, where somebody wants them."""
    if (metrics := set_up_metrics(name)) is not None:
        stack.callback(metrics.close)
        process = Process()
        metrics.expose(PROCESS, process.numbers)
        yield asyncio.create_task(process.keep_measuring())


async def _reach(stack: AsyncExitStack, settings: BusSettings, name: str) -> Bus:
    bus = await stack.enter_async_context(Bus.connect(settings, name=name))
    await bus.set_up()
    return bus


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns, or None if `stop` is set before it does."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        await cancel(stopping, working)


def listen_for_signals(stop: asyncio.Event) -> None:
    """The first SIGTERM or SIGINT sets `stop`, the second ends the process."""

    def heard(number: signal.Signals) -> None:
        if stop.is_set():
            log.warning("ended at once", signal=number.name)
            os._exit(128 + number)
        log.info("stopping", signal=number.name)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, heard, number)


def _last_line(error: BaseException) -> int:
    if (zombie := _find(error, Zombie)) is not None:
        log.error("zombie", why=str(zombie))
        return ZOMBIE
    if (wrong := _find(error, BadSettings)) is not None:
        log.error("bad settings", why=str(wrong))
        return BAD_SETTINGS
    if (known := _find(error, BusError)) is not None:
        log.error("bus failed", why=str(known), error=None if isinstance(error, BusError) else error)
        return FAILED
    log.error("died", error=error)
    return FAILED


def _find(error: BaseException, kind: type[BaseException]) -> BaseException | None:
    """The error itself or one of its group."""
    if isinstance(error, kind):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next((found for inner in error.exceptions if (found := _find(inner, kind)) is not None), None)
    return None
