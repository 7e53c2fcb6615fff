"""The manager killed at work: the next one ends what it had begun, and nothing is left running."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from manager_floor import RUN, Floor

from openforge.bus import BusSettings
from openforge.protos import EndReason, EpisodeStarted


def start_manager(floor: Floor, bus_settings: BusSettings) -> "subprocess.Popen[bytes]":
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OPENFORGE_RUN": RUN,
        "OPENFORGE_HOME": str(floor.settings.home),
        "OPENFORGE_SOCKETS": str(floor.settings.sockets),
        "OPENFORGE_NATS_URL": bus_settings.url,
        "OPENFORGE_DIE_WITH_PARENT": "1",
    }
    return subprocess.Popen([sys.executable, "-m", "openforge.sandbox_manager"], env=env)


async def begun(floor: Floor, episode: str) -> None:
    async with asyncio.timeout(60):
        while not await floor.bus.find(EpisodeStarted, RUN, episode, 0):
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("kind", ["command", "pipeline"])
async def test_a_killed_manager_loses_its_attempts_as_infrastructure(
    quiet_floor: Floor, bus_settings: BusSettings, kind: str
) -> None:
    harness = "endless" if kind == "command" else "hangs"
    first = start_manager(quiet_floor, bus_settings)
    episode = await quiet_floor.request(harness, kind, timeout_s=120)
    await begun(quiet_floor, episode)
    async with asyncio.timeout(30):
        while not quiet_floor.sleepers():
            await asyncio.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    await asyncio.to_thread(first.wait)
    second = start_manager(quiet_floor, bus_settings)
    try:
        ended = await quiet_floor.end_of(episode, within_s=90)
        assert ended.reason is EndReason.HOST_LOST
        assert quiet_floor.sleepers() == 0
        boxes = [place.stem for place in Path(quiet_floor.settings.home, "sandboxes", "boxes").iterdir()]
        assert [name for name in boxes if episode in name] == []
        assert (await quiet_floor.attempt("steps", "pipeline")).reason is EndReason.FINISHED
    finally:
        second.terminate()
        assert await asyncio.to_thread(second.wait) == 0


async def test_a_manager_that_is_asked_to_stop_ends_cleanly_and_soon(
    quiet_floor: Floor, bus_settings: BusSettings
) -> None:
    manager = start_manager(quiet_floor, bus_settings)
    episode = await quiet_floor.request("endless", "command", timeout_s=120)
    await begun(quiet_floor, episode)
    manager.terminate()
    assert await asyncio.wait_for(asyncio.to_thread(manager.wait), 15) == 0
    assert quiet_floor.sleepers() == 0
