"""How a command finds the bus of a run.

Promises: a run that works here is reached where its supervisor says; a run that rests here gets its own server for
the time of the command, and nobody else may start it meanwhile; anything else is reached at OPENFORGE_NATS_URL.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar

import msgspec
import typer

from openforge.bus import BadSettings, Bus, BusError, BusSettings
from openforge.bus.server import NatsServer, NoServerBinary, ServerConfig, ServerFailed, free_port
from openforge.cli.home import Busy, Home, Unusable
from openforge.protos import BadKey, token

T = TypeVar("T")

CONNECT_TIMEOUT_S = 10.0
# Another command may hold the run's store for as long as it reads.
WAIT_FOR_STORE_S = 30.0

BAD_USE = 2


class Unreachable(Exception):
    """There is no bus for this run; the message says what to do."""


def fail(message: str, code: int = 1) -> NoReturn:
    """Say why on standard error and end."""
    typer.echo(f"openforge: {message}", err=True)
    raise typer.Exit(code)


NO_BUS = (Unreachable, Unusable, BadSettings, NoServerBinary, ServerFailed, BusError)
"""Why the bus of a run cannot be reached, in one sentence each."""


def run_on_bus(run: str | None, act: Callable[[Bus], Coroutine[Any, Any, T]], name: str = "cli") -> T:
    """`act` on the bus of the run, as `name`; what stands in the way ends the command with one sentence."""

    async def reached() -> T:
        async with bus_of(run, name) as bus:
            return await act(bus)

    try:
        return asyncio.run(reached())
    except BadKey as error:
        fail(str(error), BAD_USE)
    except NO_BUS as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@asynccontextmanager
async def bus_of(run: str | None, name: str = "cli") -> AsyncIterator[Bus]:
    """Connected to the bus that knows the run; any bus where `run` is None. Dead letters are told by `name`.

    Raises `Unreachable`, `Unusable`, `BusError`, or `BadKey` where no run can have that name.
    """
    home = Home(token("run", run)) if run is not None else None
    address = home.address() if home else None
    if home and address:
        async with _connected(address.nats_url, home, name) as bus:
            yield bus
    elif os.environ.get("OPENFORGE_NATS_URL") or home is None:
        async with Bus.connect(_patient(BusSettings.from_env()), name=name) as bus:
            yield bus
    elif home.nats.is_dir():
        async with served(home) as url, _connected(url, home, name) as bus:
            yield bus
    else:
        raise Unreachable(
            f"run {home.run!r} has no folder {home.root} and OPENFORGE_NATS_URL is not set: go to the folder where it "
            "was started, set OPENFORGE_RUNS to the folder of runs, or set OPENFORGE_NATS_URL to its bus"
        )


@asynccontextmanager
async def _connected(url: str, home: Home, name: str) -> AsyncIterator[Bus]:
    async with Bus.connect(_patient(home.bus_settings(url)), name=name) as bus:
        yield bus


@asynccontextmanager
async def served(home: Home) -> AsyncIterator[str]:
    """Where the store of a run that rests is served: to us alone, or by whoever started the run meanwhile."""
    deadline = asyncio.get_running_loop().time() + WAIT_FOR_STORE_S
    while True:
        try:
            with home.held():
                home.credentials().make()
                users = str(home.credentials().users)
                server = NatsServer(ServerConfig(folder=str(home.nats), port=free_port(), users_file=users))
                await server.start()
                try:
                    yield server.url
                finally:
                    await server.stop()
                return
        except Busy:
            address = home.address()  # somebody started the run while we waited
            if address is None and asyncio.get_running_loop().time() > deadline:
                raise Unreachable(
                    f"run {home.run!r} is held by another command ({home.root / 'lock'}): wait for it to end"
                ) from None
        if address is not None:
            yield address.nats_url
            return
        await asyncio.sleep(0.2)


def _patient(settings: BusSettings) -> BusSettings:
    """As long as a person waits."""
    wait_s = min(settings.connect_timeout_s, CONNECT_TIMEOUT_S)
    return msgspec.structs.replace(settings, connect_timeout_s=wait_s)
