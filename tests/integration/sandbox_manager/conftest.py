"""A running manager for the run `odd`, with a peer that answers model calls."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from manager_floor import RUN, Floor, odd_config
from needed import cannot
from turn_taker import TurnTaker

from openforge.bus import Bus
from openforge.runs import submit
from openforge.sandbox.process import CannotIsolate, ProcessDriver
from openforge.sandbox_manager.serve import serve
from openforge.sandbox_manager.settings import Settings


@pytest.fixture
async def sockets() -> AsyncIterator[Path]:
    with tempfile.TemporaryDirectory(prefix="of-") as folder:
        yield Path(folder)


@pytest.fixture
async def quiet_floor(bus: Bus, tmp_path: Path, sockets: Path) -> AsyncIterator[Floor]:
    """Everything but the manager."""
    try:
        await ProcessDriver(tmp_path / "probe").close()
    except CannotIsolate as reason:
        cannot(str(reason))
    await submit(bus, odd_config())
    turns = TurnTaker(bus, RUN)
    server = await turns.listen(sockets / "proxy.sock")
    yield Floor(bus, Settings(run=RUN, home=tmp_path, sockets=sockets), turns)
    server.close()


@pytest.fixture
async def floor(quiet_floor: Floor) -> AsyncIterator[Floor]:
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(quiet_floor.settings, quiet_floor.bus, stop))
    yield quiet_floor
    stop.set()
    await serving
