"""Two managers of one run share its attempts through the bus."""

import asyncio

import msgspec
from manager_floor import RUN, Floor
from sandbox_clients import KEY, SdkLikeClient

from openforge.bus import Bus, BusSettings
from openforge.bus.server import free_port
from openforge.protos import EndReason, EpisodeStarted
from openforge.sandbox_manager.serve import serve


async def drive_a_sandbox_through_both(ports: dict[str, int]) -> None:
    """Managers of a run serve sandboxes to clients beside it."""
    anna, bert = (f"http://127.0.0.1:{port}" for port in ports.values())
    async with SdkLikeClient(anna) as first, SdkLikeClient(bert) as second:
        made = await first.create()
        assert made["replica"] == "anna"
        assert (await second.exec(made["sandbox_id"], "echo through bert"))["stdout"] == "through bert\n"


async def test_two_managers_share_the_attempts_of_a_run_and_none_is_run_twice(
    quiet_floor: Floor, bus_settings: BusSettings
) -> None:
    stop = asyncio.Event()
    ports = {"anna": free_port(), "bert": free_port()}

    async def manage(name: str) -> None:
        settings = msgspec.structs.replace(
            quiet_floor.settings,
            manager=name,
            manager_slots=2,
            manager_warm=1,
            sandbox_api_port=ports[name],
            sandbox_api_keys=(KEY,),
            sandbox_api_memory_mb=256,
            sandbox_api_disk_mb=16,
        )
        async with Bus.connect(bus_settings, name=name) as bus:
            await serve(settings, bus, stop)

    async with asyncio.TaskGroup() as group:
        for name in ("anna", "bert"):
            group.create_task(manage(name))
        episodes = [await quiet_floor.request("good", "command", timeout_s=60) for _ in range(10)]
        ends = await asyncio.gather(*(quiet_floor.end_of(episode, within_s=240) for episode in episodes))
        await drive_a_sandbox_through_both(ports)
        stop.set()
    assert {ended.reason for ended in ends} == {EndReason.FINISHED}
    started = [await quiet_floor.bus.find(EpisodeStarted, RUN, episode, 0) for episode in episodes]
    assert {told.fact.manager for told in started if told} == {"anna", "bert"}
    assert len(quiet_floor.turns.seen) == len(episodes)
    assert list((quiet_floor.settings.home / "sandboxes" / "boxes").iterdir()) == []
