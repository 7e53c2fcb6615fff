"""Nothing is left of episodes whose manager, bus and daemon are killed at random: 100 here, 2,000 in `make soak`."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from container_daemons import KilledAndRestarted
from leak_soak import leak_soak
from leftovers import left_by

from openforge.cli.soak import RunEnded, disturbed

TINY = Path(__file__).parents[2] / "examples" / "tiny.toml"


@pytest.mark.heavy
async def test_nothing_is_left_and_the_ledger_closes(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("l")
    result = await leak_soak(folder, episodes=100, kills=6, seed=3)
    assert result["left"] == {"processes": [], "mounts": [], "cgroups": [], "containers": [], "files": []}
    assert (result["exit_code"], result["ledger_closes"], result["episodes"]) == (0, True, 100)
    assert result["kills"] >= 4


@pytest.mark.heavy
async def test_a_bus_that_cannot_be_kept_running_ends_the_run_and_leaves_nothing(tmp_path: Path) -> None:
    async with disturbed(TINY, tmp_path, "busless") as run:
        await run.kill("nats", wait_s=120)
        with suppress(RunEnded, TimeoutError):
            for _ in range(20):  # as quickly as it comes back
                await run.kill("nats", wait_s=30)
        async with asyncio.timeout(300):
            assert await run.process.wait() == 1
    assert "nats ended with exit code -9: it died 6 times in a row" in (run.home.root / "train.log").read_text()
    assert left_by("busless", str(tmp_path), [run.home.sockets]).none


@pytest.mark.containers
async def test_nothing_is_left_of_containers_either(tmp_path: Path) -> None:
    docker = KilledAndRestarted()
    try:
        result = await leak_soak(tmp_path, episodes=40, kills=4, seed=5, docker=docker)
    finally:
        docker.stop()
    assert result["left"] == {"processes": [], "mounts": [], "cgroups": [], "containers": [], "files": []}
    assert (result["exit_code"], result["ledger_closes"], result["episodes"]) == (0, True, 40)
