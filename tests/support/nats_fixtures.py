"""A real nats-server for each test that asks for one."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from openforge.bus import Bus, BusSettings
from openforge.bus.server import NatsServer, ServerConfig, free_port


@pytest.fixture
async def nats_server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """Running; `stop`, `kill` and `start` again keep folder and port."""
    server = NatsServer(ServerConfig(folder=str(tmp_path / "nats"), port=free_port()))
    await server.start()
    yield server
    await server.kill()


@pytest.fixture
def bus_settings(nats_server: NatsServer) -> BusSettings:
    return BusSettings(url=nats_server.url, connect_timeout_s=10.0)


@pytest.fixture
async def bus(bus_settings: BusSettings) -> AsyncIterator[Bus]:
    """Connected and set up."""
    async with Bus.connect(bus_settings, name="test") as bus:
        await bus.set_up()
        yield bus
