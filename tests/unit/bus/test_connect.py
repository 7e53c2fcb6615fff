"""Who may connect, and what a user reads who may not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nkeys
import pytest
from bus_examples import stopped
from certificates import make_certificates
from needed import needs

from openforge.bus import BadSettings, Bus, BusClosed, BusSettings, NoServer
from openforge.bus.server import NatsServer, ServerConfig, free_port
from openforge.protos import RunStopped

needs_openssl = needs("openssl")


@asynccontextmanager
async def server(folder: Path, **config: Any) -> AsyncIterator[NatsServer]:
    running = NatsServer(ServerConfig(folder=str(folder / "nats"), port=free_port(), **config))
    await running.start()
    try:
        yield running
    finally:
        await running.kill()


async def assert_works(settings: BusSettings) -> None:
    async with Bus.connect(settings, name="test") as bus:
        await bus.set_up()
        await bus.tell(stopped(0))
        assert await bus.find(RunStopped, "r", 0) is not None


@needs_openssl
async def test_a_user_with_a_password_works_over_tls(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path)
    (tmp_path / "password").write_text("secret\n")
    config = {"users": {"forge": "secret"}, "tls_cert": certificates.cert, "tls_key": certificates.key}
    async with server(tmp_path, **config) as running:
        settings = BusSettings(
            url=running.url, user="forge", password_file=str(tmp_path / "password"), tls_ca=certificates.ca
        )
        await assert_works(settings)
        await running.restart()
        async with Bus.connect(settings, name="again") as bus:
            assert await bus.count(RunStopped, "r") == 1


@needs_openssl
async def test_a_server_that_wants_a_certificate_lets_in_whoever_has_one(tmp_path: Path) -> None:
    ca, cert, key = make_certificates(tmp_path)
    async with server(tmp_path, tls_cert=cert, tls_key=key, tls_ca=ca) as running:
        await assert_works(BusSettings(url=running.url, tls_ca=ca, tls_cert=cert, tls_key=key))
        with pytest.raises(NoServer):
            await assert_works(BusSettings(url=running.url, tls_ca=ca, connect_timeout_s=1.0))


@needs_openssl
async def test_a_server_whose_authority_we_do_not_know_is_not_trusted(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path)
    async with server(tmp_path, tls_cert=certificates.cert, tls_key=certificates.key) as running:
        with pytest.raises(NoServer, match="certificate"):
            await assert_works(BusSettings(url=running.url, connect_timeout_s=1.0))


async def test_an_nkey_works_over_a_restart_of_the_server(tmp_path: Path) -> None:
    pair, seed_file = user_key(tmp_path)
    async with server(tmp_path, nkeys=(pair.public_key.decode(),)) as running:
        settings = BusSettings(url=running.url, nkey_seed_file=str(seed_file))
        async with Bus.connect(settings, name="test") as bus:
            await bus.set_up()
            await bus.tell(stopped(0))
            await running.kill()
            await running.start()
            async with asyncio.timeout(10):
                await bus.tell(stopped(1))


def user_key(folder: Path) -> "tuple[nkeys.KeyPair, Path]":
    pair = nkeys.from_seed(bytearray(nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER)))
    seed_file = folder / "user.nk"
    seed_file.write_bytes(bytes(pair.seed))
    return pair, seed_file


async def test_a_wrong_password_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("wrong")
    async with server(tmp_path, users={"forge": "secret"}) as running:
        settings = BusSettings(url=running.url, user="forge", password_file=str(tmp_path / "password"))
        async with asyncio.timeout(10):
            with pytest.raises(NoServer, match=r"did not let us in.*Authorization"):
                await assert_works(settings)


async def test_no_server_is_said_with_its_address_and_the_way_out() -> None:
    settings = BusSettings(url=f"nats://127.0.0.1:{free_port()}", connect_timeout_s=0.5)
    with pytest.raises(NoServer, match=r"nats://127.0.0.1:\d+ within 0.5 s.*OPENFORGE_NATS_URL"):
        await assert_works(settings)


async def test_a_server_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    late = NatsServer(ServerConfig(folder=str(tmp_path / "nats"), port=free_port()))
    working = asyncio.create_task(assert_works(BusSettings(url=late.url, connect_timeout_s=20.0)))
    await asyncio.sleep(0.5)
    await late.start()
    try:
        await working
    finally:
        await late.kill()


async def test_a_closed_bus_says_so_to_everybody_who_waits(bus_settings: BusSettings) -> None:
    async with Bus.connect(bus_settings, name="test") as bus:
        await bus.set_up()
        following = bus.follow(("run",))
        await anext(following)
        waiting = asyncio.ensure_future(anext(following))
        await asyncio.sleep(0.1)
    with pytest.raises(BusClosed):
        await asyncio.wait_for(waiting, 5)
    with pytest.raises(BusClosed):
        await bus.tell(stopped(0))


def test_settings_come_from_the_environment(tmp_path: Path) -> None:
    seed = tmp_path / "seed"
    seed.touch()
    settings = BusSettings.from_env(
        {
            "OPENFORGE_NATS_URL": "nats://a:4222,nats://b:4222",
            "OPENFORGE_NATS_NKEY_SEED_FILE": str(seed),
            "OPENFORGE_STREAM_MAX_BYTES": "1000000",
            "OPENFORGE_BLOBS": "/blobs",
        }
    )
    assert settings.servers() == ["nats://a:4222", "nats://b:4222"]
    assert (settings.nkey_seed_file, settings.streams.max_bytes, settings.blobs) == (str(seed), 1_000_000, "/blobs")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OPENFORGE_STREAM_MAX_BYTES", "many"),
        ("OPENFORGE_STREAM_REPLICAS", "-1"),
        ("OPENFORGE_NATS_CREDS", "/no/such/file"),
        ("OPENFORGE_NATS_CONNECT_TIMEOUT_S", "nan"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_variable_and_value(variable: str, value: str) -> None:
    with pytest.raises(BadSettings, match=f"{variable} = '{value}'"):
        BusSettings.from_env({variable: value})
