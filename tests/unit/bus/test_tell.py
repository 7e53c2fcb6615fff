"""Facts are told once for ever."""

import asyncio

import msgspec
import pytest

from openforge.bus import AlreadyTold, Bus, BusSettings
from openforge.protos import RunPaused, RunStopped, StopReason


def stopped(generation: int, detail: str = "") -> RunStopped:
    return RunStopped(run="r", generation=generation, reason=StopReason.FAILED, detail=detail)


async def test_a_told_fact_is_found_by_its_natural_key(bus: Bus) -> None:
    sequence = await bus.tell(stopped(0))
    told = await bus.find(RunStopped, "r", 0)
    assert told is not None
    assert (told.fact, told.sequence, told.kind) == (stopped(0), sequence, "run")
    assert await bus.find(RunStopped, "r", 1) is None


async def test_a_second_telling_is_refused_and_shows_what_lies_there(bus: Bus) -> None:
    sequence = await bus.tell(stopped(0))
    with pytest.raises(AlreadyTold) as same:
        await bus.tell(stopped(0))
    with pytest.raises(AlreadyTold) as other:
        await bus.tell(stopped(0, "another story"))
    assert (same.value.sequence, same.value.same, other.value.same) == (sequence, True, False)
    assert other.value.existing is not None
    assert other.value.existing.fact == stopped(0)


async def test_a_second_telling_is_refused_after_the_duplicate_window(bus_settings: BusSettings) -> None:
    short = msgspec.structs.replace(
        bus_settings, streams=msgspec.structs.replace(bus_settings.streams, duplicate_window_s=0.2)
    )
    async with Bus.connect(short, name="test") as bus:
        await bus.set_up()
        await bus.tell(stopped(0))
        await asyncio.sleep(0.5)
        with pytest.raises(AlreadyTold):
            await bus.tell(stopped(0))
        assert await bus.count(RunStopped, "r") == 1


async def test_many_facts_are_told_in_order_and_the_same_again_is_fine(bus: Bus) -> None:
    facts = [stopped(n) for n in range(1000)]
    assert await bus.tell_all(facts) == await bus.tell_all(facts) == list(range(1, 1001))
    assert [told.fact for told in await bus.read(RunStopped, "r")] == facts
    assert await bus.count(RunStopped, "r") == 1000
    assert await bus.count(RunPaused, "r") == 0
