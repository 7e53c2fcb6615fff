"""Nothing is lost or doubled, whatever breaks between the bus and its server."""

import asyncio
import random

import msgspec
import pytest
from bus_examples import stopped
from flaky_network import FlakyNetwork

from openforge.bus import CAUGHT_UP, AlreadyTold, Bus, BusSettings, Told
from openforge.bus.server import NatsServer
from openforge.protos import RunPaused, RunStopped


async def assert_told_once(bus: Bus, generations: int) -> None:
    tolds = await bus.read(RunStopped, "r")
    assert sorted(told.fact.generation for told in tolds) == list(range(generations))


async def test_nothing_is_lost_or_doubled_when_the_server_is_killed_while_facts_are_told(
    bus: Bus, nats_server: NatsServer
) -> None:
    facts = 3000

    async def tell_alone() -> None:
        for generation in range(0, facts, 2):
            await bus.tell(stopped(generation))

    async def tell_many() -> None:
        await bus.tell_all([stopped(generation) for generation in range(1, facts, 2)])

    async def kill_now_and_then() -> None:
        for _ in range(3):
            await asyncio.sleep(random.uniform(0.1, 0.4))
            await nats_server.kill()
            await nats_server.start()

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(tell_alone())
        group.create_task(tell_many())
        group.create_task(kill_now_and_then())
    await assert_told_once(bus, facts)


async def test_nothing_is_lost_or_doubled_over_network_breaks(
    bus: Bus, bus_settings: BusSettings, network: FlakyNetwork
) -> None:
    facts = 2000

    async def break_now_and_then() -> None:
        for _ in range(4):
            await asyncio.sleep(random.uniform(0.05, 0.3))
            network.cut()
            await asyncio.sleep(0.2)
            network.heal()

    async with Bus.connect(msgspec.structs.replace(bus_settings, url=network.url), name="far") as far:
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(far.tell_all([stopped(generation) for generation in range(facts)]))
            group.create_task(break_now_and_then())
    await assert_told_once(bus, facts)


async def test_a_telling_whose_answer_got_lost_is_one_telling(
    bus: Bus, bus_settings: BusSettings, network: FlakyNetwork
) -> None:
    # the window is over when the telling is repeated, so the fence and not the message id must decide
    short = msgspec.structs.replace(
        bus_settings, url=network.url, streams=msgspec.structs.replace(bus_settings.streams, duplicate_window_s=0.1)
    )
    async with Bus.connect(short, name="far") as far:
        await far.set_up()
        await far.tell(stopped(0))
        network.swallow_answers()
        telling = asyncio.create_task(far.tell(stopped(1)))
        while await bus.count(RunStopped, "r") < 2:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        network.cut()
        network.heal()
        assert await telling == 2
        with pytest.raises(AlreadyTold) as deliberate:
            await far.tell(stopped(1))
        assert deliberate.value.same
    await assert_told_once(bus, 2)


async def test_a_full_stream_waits_and_goes_on_after_space_is_made(bus_settings: BusSettings) -> None:
    small = msgspec.structs.replace(
        bus_settings, streams=msgspec.structs.replace(bus_settings.streams, max_bytes=64 * 1024)
    )
    async with Bus.connect(small, name="test") as bus:
        await bus.set_up()
        telling = asyncio.create_task(bus.tell_all([stopped(n, str(n) * 200) for n in range(400)]))
        await asyncio.sleep(1.0)
        assert not telling.done()
        held = await bus.count(RunStopped, "r")
        assert 0 < held < 400
        roomy = msgspec.structs.replace(small.streams, max_bytes=4 << 20)
        async with Bus.connect(msgspec.structs.replace(small, streams=roomy), name="admin") as admin:
            await admin.set_up()
        async with asyncio.timeout(20):
            await telling
        await assert_told_once(bus, 400)


async def test_a_folder_reads_each_fact_once_in_order_over_kills_of_the_server(
    bus: Bus, nats_server: NatsServer
) -> None:
    facts = 1500
    seen: list[int] = []

    async def fold() -> None:
        async for told in bus.follow(("run",)):
            if isinstance(told, Told):
                seen.append(told.sequence)
                if len(seen) == facts:
                    return

    async def tell() -> None:
        for start in range(0, facts, 100):
            await bus.tell_all([stopped(generation) for generation in range(start, start + 100)])
            await asyncio.sleep(0.05)

    async def kill_now_and_then() -> None:
        for _ in range(3):
            await asyncio.sleep(random.uniform(0.1, 0.4))
            await nats_server.kill()
            await nats_server.start()

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for task in (fold(), tell(), kill_now_and_then()):
            group.create_task(task)
    assert seen == list(range(1, facts + 1))


async def test_workers_handle_everything_over_a_kill_of_the_server(bus: Bus, nats_server: NatsServer) -> None:
    facts = 200

    async def handle(told: Told[RunStopped]):
        await asyncio.sleep(0.01)
        yield RunPaused(run="r", generation=told.fact.generation)

    async with asyncio.timeout(60):
        working = asyncio.create_task(bus.work(service="w", fact=RunStopped, handler=handle, ack_wait_s=2.0))
        await bus.tell_all([stopped(generation) for generation in range(facts // 2)])
        await nats_server.kill()
        await nats_server.start()
        await bus.tell_all([stopped(generation) for generation in range(facts // 2, facts)])
        while await bus.count(RunPaused, "r") < facts:
            await asyncio.sleep(0.05)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    assert await bus.dead_letters() == []


async def test_a_folder_goes_on_after_a_network_break(
    bus: Bus, bus_settings: BusSettings, network: FlakyNetwork
) -> None:
    async with Bus.connect(msgspec.structs.replace(bus_settings, url=network.url), name="far") as far:
        following = far.follow(("run",))
        assert await anext(following) is CAUGHT_UP
        network.cut()
        await bus.tell_all([stopped(n) for n in range(10)])
        network.heal()
        async with asyncio.timeout(20):
            got = [await anext(following) for _ in range(10)]
        assert [told.sequence for told in got if isinstance(told, Told)] == list(range(1, 11))
        await following.aclose()
