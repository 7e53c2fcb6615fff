"""A real nats-server that lets in nobody but the roles of the permission table."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from openforge.bus import Bus, BusSettings
from openforge.bus.credentials import Credentials
from openforge.bus.server import NatsServer, ServerConfig, free_port


class World:
    def __init__(self, server: NatsServer, credentials: Credentials) -> None:
        self.server = server
        self.credentials = credentials

    def settings(self, role: str, name: str = "") -> BusSettings:
        seed = str(self.credentials.seed(role, name))
        return BusSettings(url=self.server.url, nkey_seed_file=seed, connect_timeout_s=5.0)

    @asynccontextmanager
    async def bus(self, role: str, name: str = "") -> AsyncIterator[Bus]:
        async with Bus.connect(self.settings(role, name), name=role) as bus:
            yield bus


@asynccontextmanager
async def world_at(folder: Path, *, consumers: Iterable[str] = (), max_payload: str = "8MB") -> AsyncIterator[World]:
    credentials = Credentials(folder / "keys")
    credentials.make(consumers)
    server = NatsServer(
        ServerConfig(
            folder=str(folder / "nats"),
            port=free_port(),
            users_file=str(credentials.users),
            max_payload=max_payload,
        )
    )
    await server.start()
    try:
        yield World(server, credentials)
    finally:
        await server.kill()
