"""Runs a run on this machine from its first fact to its last: server, services, watch, end.

Promises: when it returns, nothing that it started is left, and the run either stopped with a reason that
is on the bus or can be resumed by the same command.
"""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress

import msgspec

from openforge.bus import CAUGHT_UP, Bus, Told
from openforge.bus.permissions import OPERATOR
from openforge.bus.server import ServerConfig, find_binary, server_env
from openforge.cli.finish import write_summary_and_report
from openforge.cli.follow import Watch, signals, until_over
from openforge.cli.home import Home
from openforge.cli.local import Ports, address, nats_url, service_specs
from openforge.cli.supervise import GaveUp, Spec, Supervisor
from openforge.protos import EpisodeSealed, EpisodeStarted, StopReason
from openforge.runs import RunConfig, stop_run, submit
from openforge.runs.progress import Progress
from openforge.runs.summary import Summary

CANCEL_S = 10.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How the conduct of a run ended, and what was known of it then."""

    reason: StopReason
    detail: str
    progress: Progress
    summary: Summary


Dress = Callable[[Spec, Ports], Spec]
Finish = Callable[[Bus, RunConfig, Home], Awaitable[Summary]]


def as_it_is(spec: Spec, _: Ports) -> Spec:
    return spec


async def conduct(
    config: RunConfig,
    home: Home,
    look: Callable[[Watch], None],
    dress: Dress = as_it_is,
    finish: Finish = write_summary_and_report,
    stopped: asyncio.Event | None = None,
) -> Outcome:
    """Start or resume the run and return when it ended; `look` is called whenever something may have changed.

    `dress` may change how a service is started; `finish` reads the streams when the run is over. `stopped` asks it to
    end; without one it listens for signals itself. Raises `GaveUp` where the server of the bus cannot be kept running.
    """
    async with bus_at_home(home, stopped) as (bus, ports, watch, stopped):
        await submit(bus, config)
        watch.progress = Progress()
        async with _services(config, home, ports, watch, dress):
            reason, detail = await until_over(bus, config, watch, look, stopped)
            if watch.bus_gone:
                raise GaveUp(detail)
            await stop_run(bus, config.run.name, reason, detail)
            if reason is not StopReason.FAILED:
                await _let_go(bus, config)
        summary = await finish(bus, config, home)
        return Outcome(reason=reason, detail=detail, progress=watch.progress, summary=summary)


async def stand_by(config: RunConfig, home: Home, say: Callable[[str], None]) -> None:
    """Keep bus and services running until somebody stops us."""
    async with bus_at_home(home) as (_, ports, watch, stopped):
        async with _services(config, home, ports, watch):
            seed = home.credentials().seed(OPERATOR)
            say(
                f"bus {nats_url(ports)} (OPENFORGE_NATS_NKEY_SEED_FILE={seed})  "
                f"proxy http://127.0.0.1:{ports.proxy}  run {config.run.name}; Ctrl-C stops it"
            )
            while not stopped.is_set() and not watch.note:
                await asyncio.sleep(0.5)
    if watch.note:
        raise GaveUp(watch.note)


@asynccontextmanager
async def bus_at_home(
    home: Home, asked: asyncio.Event | None = None
) -> AsyncIterator[tuple[Bus, Ports, Watch, asyncio.Event]]:
    """The run's own server and a connection to it, for the time of the block; signals set the last of the four, unless
    the caller listens for them and sets `asked`."""
    home.make()
    ports, stopped = Ports.free(), asked or asyncio.Event()
    watch = Watch(progress=Progress(), processes=[])
    with signals(stopped) if asked is None else nullcontext():
        server = Supervisor([_server_spec(home, ports)], on_change=lambda _: _tell_pids(home, watch))
        watch.processes.extend(server.processes)
        try:
            async with _running(server, watch, is_bus=True), _connected(home, ports) as bus:
                yield bus, ports, watch, stopped
        finally:
            shutil.rmtree(home.sockets, ignore_errors=True)


@asynccontextmanager
async def _services(
    config: RunConfig, home: Home, ports: Ports, watch: Watch, dress: Dress = as_it_is
) -> AsyncIterator[None]:
    specs = [dress(spec, ports) for spec in service_specs(config, home, ports)]
    services = Supervisor(specs, on_change=lambda _: _tell_pids(home, watch))
    watch.processes.extend(services.processes)
    async with _running(services, watch):
        yield


async def _let_go(bus: Bus, config: RunConfig) -> None:
    """Give the services a moment to end what is in flight, so that the streams say how it ended."""
    open_attempts: set[tuple[str, int]] = set()
    live = False
    with suppress(TimeoutError):
        async with asyncio.timeout(CANCEL_S):
            async for told in bus.follow(("episode",), run=config.run.name):
                match told:
                    case Told(fact=EpisodeStarted() as fact):
                        open_attempts.add((fact.episode, fact.attempt))
                    case Told(fact=EpisodeSealed() as fact):
                        open_attempts.discard((fact.episode, fact.attempt))
                live = live or told is CAUGHT_UP
                if live and not open_attempts:
                    return


def _server_spec(home: Home, ports: Ports) -> Spec:
    home.credentials().make()
    config = ServerConfig(
        folder=str(home.nats),
        port=ports.nats,
        sync=os.environ.get("OPENFORGE_NATS_SYNC", "2m"),
        users_file=str(home.credentials().users),
    )
    file = home.nats / "nats.conf"
    file.write_text(config.text())
    return Spec(
        name="nats",
        argv=(find_binary(), "-c", str(file)),
        env=server_env(),
        log=home.logs / "nats.log",
    )


@asynccontextmanager
async def _running(supervisor: Supervisor, watch: Watch, *, is_bus: bool = False) -> AsyncIterator[None]:
    """Keeps the processes running for the time of the block; one that cannot be kept is noted in `watch`."""

    async def keep() -> None:
        try:
            await supervisor.run()
        except GaveUp as gave_up:
            watch.note, watch.bus_gone = str(gave_up), is_bus

    keeping = asyncio.create_task(keep())
    try:
        yield
    finally:
        await supervisor.stop()
        await keeping


@asynccontextmanager
async def _connected(home: Home, ports: Ports) -> AsyncIterator[Bus]:
    """The run's bus, its address told to other commands for the time of the block."""
    async with Bus.connect(home.bus_settings(nats_url(ports)), name="train") as bus:
        await bus.set_up()
        home.tell_address(address(ports))
        try:
            yield bus
        finally:
            home.forget_address()


def _tell_pids(home: Home, watch: Watch) -> None:
    """What runs now, for `openforge status` and for whoever wants to kill something."""
    processes = {
        process.spec.name: {
            "pid": process.process.pid if process.process else None,
            "state": process.state,
            "starts": process.starts,
        }
        for process in watch.processes
    }
    scratch = home.root / "processes.tmp"
    with suppress(OSError):  # on a full disk a service that has to write ends, with its own last words; this can wait
        scratch.write_bytes(msgspec.json.encode(processes))
        scratch.replace(home.root / "processes.json")
