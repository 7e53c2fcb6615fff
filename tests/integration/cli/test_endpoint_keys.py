"""The keys of endpoints on this machine: who has them in the environment."""

from pathlib import Path

import pytest
from learner_world import run_config

from openforge.bus.server import NatsServer, ServerConfig, free_port
from openforge.cli.conduct import bus_at_home
from openforge.cli.home import Home
from openforge.cli.local import Ports, service_specs

KEYS = {"ENGINE_KEY": "secret-of-the-model", "JUDGE_KEY": "secret-of-the-judge"}


@pytest.fixture(autouse=True)
def _keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name, key in KEYS.items():
        monkeypatch.setenv(name, key)


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def test_the_key_of_an_endpoint_is_with_the_service_that_asks_there(tmp_path: Path) -> None:
    config = run_config(
        tmp_path,
        engine={"kind": "endpoint", "url": "http://e/v1", "model": "m", "key_env": "ENGINE_KEY"},
        judge={"url": "http://j/v1", "model": "m", "key_env": "JUDGE_KEY"},
    )
    ports = Ports(nats=1, engine=2, proxy=3)
    specs = {spec.name: spec.env for spec in service_specs(config, Home("r", tmp_path), ports)}
    assert [name for name, env in specs.items() if "ENGINE_KEY" in env] == ["engine"]
    assert [name for name, env in specs.items() if "JUDGE_KEY" in env] == ["verifier"]


async def test_no_server_of_the_bus_has_the_key_of_an_endpoint(tmp_path: Path) -> None:
    async with bus_at_home(Home("keys", tmp_path)) as (_, _, watch, _):
        process = watch.processes[0].process
        assert process is not None
        told = environment_of(process.pid)
    server = NatsServer(ServerConfig(folder=str(tmp_path / "nats"), port=free_port()))
    await server.start()
    try:
        assert server.pid is not None
        told += environment_of(server.pid)
    finally:
        await server.stop()
    assert b"PATH=" in told
    assert not [key for key in KEYS.values() if key.encode() in told]
