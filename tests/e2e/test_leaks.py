"""Nothing is left of episodes whose manager, bus and daemon are killed at random: 100 here, 2,000 in `make soak`."""

from pathlib import Path

import pytest
from container_daemons import KilledAndRestarted
from leak_soak import leak_soak


@pytest.mark.heavy
async def test_nothing_is_left_and_the_ledger_closes(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("l")
    result = await leak_soak(folder, episodes=100, kills=6, seed=3)
    assert result["nothing_left"], result["left"]
    assert (result["exit_code"], result["ledger_closes"], result["episodes"]) == (0, True, 100)
    assert result["kills"] >= 4


@pytest.mark.long
async def test_nothing_is_left_of_containers_either(tmp_path: Path) -> None:
    docker = KilledAndRestarted()
    try:
        result = await leak_soak(tmp_path, episodes=40, kills=4, seed=5, docker=docker)
    finally:
        docker.stop()
    assert result["nothing_left"], result["left"]
    assert (result["exit_code"], result["ledger_closes"], result["episodes"]) == (0, True, 40)
