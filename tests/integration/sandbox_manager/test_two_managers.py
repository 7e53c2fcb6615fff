"""Two managers of one run share its attempts through the bus."""

import asyncio

import msgspec
from manager_floor import RUN, Floor

from openforge.bus import Bus, BusSettings
from openforge.protos import EndReason, EpisodeStarted
from openforge.sandbox_manager.serve import serve


async def test_two_managers_share_the_attempts_of_a_run_and_none_is_run_twice(
    quiet_floor: Floor, bus_settings: BusSettings
) -> None:
    stop = asyncio.Event()

    async def manage(name: str) -> None:
        settings = msgspec.structs.replace(quiet_floor.settings, manager=name, manager_slots=2, manager_warm=1)
        async with Bus.connect(bus_settings, name=name) as bus:
            await serve(settings, bus, stop)

    async with asyncio.TaskGroup() as group:
        for name in ("anna", "bert"):
            group.create_task(manage(name))
        episodes = [await quiet_floor.request("good", "command", timeout_s=60) for _ in range(10)]
        ends = await asyncio.gather(*(quiet_floor.end_of(episode, within_s=240) for episode in episodes))
        stop.set()
    assert {ended.reason for ended in ends} == {EndReason.FINISHED}
    started = [await quiet_floor.bus.find(EpisodeStarted, RUN, episode, 0) for episode in episodes]
    assert {told.fact.manager for told in started if told} == {"anna", "bert"}
    assert len(quiet_floor.turns.seen) == len(episodes)
    assert list((quiet_floor.settings.home / "sandboxes" / "boxes").iterdir()) == []
