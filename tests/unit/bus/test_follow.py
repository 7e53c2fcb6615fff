"""Folders read facts in order and take nothing away."""

import asyncio
import random

from bus_examples import paused, stopped

from openforge.bus import CAUGHT_UP, Bus, Cursors, Told
from openforge.protos import Fact, GroupOpened, RunStopped, TaskRef


def opened(ordinal: int, run: str = "r") -> GroupOpened:
    task = TaskRef(env="shell", task="make", seed=ordinal)
    return GroupOpened(
        run=run, group=f"g{ordinal:06}", ordinal=ordinal, purpose="train", task=task, size=2, start_version=0
    )


async def existing(bus: Bus, *kinds: str, cursors: Cursors = Cursors(), run: str = "*") -> list[Told[Fact]]:
    following = bus.follow(kinds, run=run, cursors=cursors, until_now=True)
    tolds = [told async for told in following]
    assert tolds[-1] is CAUGHT_UP
    return [told for told in tolds if isinstance(told, Told)]


async def test_nothing_exists_and_the_folder_is_caught_up_at_once(bus: Bus) -> None:
    assert await existing(bus, "run", "group", "episode", "turn", "trajectory", "policy") == []


async def test_kinds_are_merged_by_time_while_catching_up(bus: Bus) -> None:
    facts: list[Fact] = []
    for n in range(60):
        fact = random.choice((stopped, opened))(n)
        await bus.tell(fact)
        facts.append(fact)
    assert [told.fact for told in await existing(bus, "run", "group")] == facts


async def test_following_resumes_after_the_cursors_of_each_kind(bus: Bus) -> None:
    await bus.tell_all([stopped(n) for n in range(5)])
    await bus.tell_all([opened(n) for n in range(5)])
    cursors = Cursors()
    for told in await existing(bus, "run", "group"):
        if told.sequence <= 3:
            cursors = cursors.after(told)
    assert cursors == Cursors({"run": 3, "group": 3})
    rest = await existing(bus, "run", "group", cursors=cursors)
    assert [(told.kind, told.sequence) for told in rest] == [("run", 4), ("run", 5), ("group", 4), ("group", 5)]
    assert (await existing(bus, "run", cursors=Cursors({"run": 99}))) == []


async def test_a_folder_of_one_run_sees_no_other(bus: Bus) -> None:
    await bus.tell_all([stopped(0, run="r"), stopped(0, run="s"), opened(0, run="s")])
    assert [told.fact.run for told in await existing(bus, "run", "group", run="s")] == ["s", "s"]


async def test_what_is_new_comes_after_caught_up_from_every_kind(bus: Bus) -> None:
    await bus.tell(stopped(0))
    following = bus.follow(("run", "group"))
    async with asyncio.timeout(10):
        assert isinstance(await anext(following), Told)
        assert await anext(following) is CAUGHT_UP
        await bus.tell(opened(0))
        first = await anext(following)
        await bus.tell(paused(1))
        second = await anext(following)
    assert [told.fact for told in (first, second) if isinstance(told, Told)] == [opened(0), paused(1)]
    await following.aclose()


async def test_thousands_of_facts_come_in_pages_without_a_gap(bus: Bus) -> None:
    await bus.tell_all([stopped(n) for n in range(2000)])
    assert [told.sequence for told in await existing(bus, "run")] == list(range(1, 2001))


async def test_a_message_that_is_no_fact_is_told_dead_once_and_passed_over(bus: Bus) -> None:
    await bus.tell(stopped(0))
    await bus.link.js.publish("of.r.run.stopped.1", b"\xff nonsense")
    await bus.tell(stopped(2))
    for _ in range(2):
        assert [told.sequence for told in await existing(bus, "run")] == [1, 3]
    [letter] = await bus.dead_letters()
    assert (letter.service, letter.subject, letter.original) == ("test", "of.r.run.stopped.1", b"\xff nonsense")


async def test_a_fact_that_only_a_newer_version_knows_is_passed_over(bus: Bus) -> None:
    newer = stopped(0).encode().replace(b"RunStopped", b"RunSpotted")
    await bus.link.js.publish("of.r.run.spotted.0", newer)
    await bus.tell(stopped(1))
    assert [told.sequence for told in await existing(bus, "run")] == [2]
    assert await bus.dead_letters() == []


async def test_following_leaves_no_consumer_behind(bus: Bus) -> None:
    await existing(bus, "run", "group")
    following = bus.follow(("run",))
    await anext(following)
    await following.aclose()
    async with asyncio.timeout(5):
        while await bus.link.js.consumers_info("RUN"):
            await asyncio.sleep(0.02)


async def test_a_folder_whose_consumer_was_deleted_makes_it_again(bus: Bus) -> None:
    following = bus.follow(("run",))
    assert await anext(following) is CAUGHT_UP
    pending = asyncio.ensure_future(anext(following))
    await asyncio.sleep(0.1)
    for info in await bus.link.js.consumers_info("RUN"):
        await bus.link.js.delete_consumer("RUN", info.name)
    await bus.tell(stopped(0))
    async with asyncio.timeout(10):
        told = await pending
    assert isinstance(told, Told)
    assert told.fact == stopped(0)
    await following.aclose()


async def test_facts_stay_for_others_after_a_folder_read_them(bus: Bus) -> None:
    await bus.tell(stopped(0))
    await existing(bus, "run")
    assert await bus.count(RunStopped, "r") == 1
