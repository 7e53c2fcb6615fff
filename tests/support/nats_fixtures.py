"""A real nats-server for each test that asks for one."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from flaky_network import FlakyNetwork

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


@pytest.fixture
async def network(nats_server: NatsServer) -> AsyncIterator[FlakyNetwork]:
    """A way to the server that tests can break."""
    network = FlakyNetwork(nats_server.config.port)
    await network.start()
    yield network
    await network.close()
