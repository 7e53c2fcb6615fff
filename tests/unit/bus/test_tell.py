"""Facts are told once for ever."""

import asyncio
import secrets

import msgspec
import pytest
from bus_examples import paused, stopped

from openforge.bus import AlreadyTold, Bus, BusSettings, Refused
from openforge.bus.streams import BLOB_STORE
from openforge.protos import BadKey, RunPaused, RunStopped


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


async def test_two_processes_that_tell_the_same_key_at_once_store_one_fact(bus: Bus, bus_settings: BusSettings) -> None:
    async with Bus.connect(bus_settings, name="other") as other:
        for generation in range(20):
            outcomes = await asyncio.gather(
                bus.tell(stopped(generation, "one")),
                other.tell(stopped(generation, "two")),
                return_exceptions=True,
            )
            assert {type(outcome) for outcome in outcomes} == {int, AlreadyTold}
    assert await bus.count(RunStopped, "r") == 20


async def test_many_facts_are_told_in_order_and_the_same_again_is_fine(bus: Bus) -> None:
    facts = [stopped(n) for n in range(500)]
    assert await bus.tell_all(facts) == await bus.tell_all(facts) == list(range(1, 501))
    assert [told.fact for told in await bus.read(RunStopped, "r")] == facts
    assert await bus.count(RunStopped, "r") == 500
    assert await bus.count(RunPaused, "r") == 0


async def test_one_key_with_other_bytes_among_many_is_raised_after_all_others_are_told(bus: Bus) -> None:
    await bus.tell(stopped(3, "first"))
    with pytest.raises(AlreadyTold, match=r"of\.r\.run\.stopped\.3"):
        await bus.tell_all([stopped(n) for n in range(10)])
    assert await bus.count(RunStopped, "r") == 10


async def test_facts_are_read_by_the_beginning_of_their_key_in_order(bus: Bus) -> None:
    await bus.tell_all([stopped(1), paused(0), stopped(0), stopped(0, run="s")])
    assert [told.fact for told in await bus.read(RunStopped, "r")] == [stopped(1), stopped(0)]
    assert [told.fact for told in await bus.read(RunStopped, "*")] == [stopped(1), stopped(0), stopped(0, run="s")]
    assert [told.fact for told in await bus.read(RunStopped, "r", 0)] == [stopped(0)]


async def test_a_large_fact_that_shrinks_is_stored_small(bus: Bus) -> None:
    await bus.tell(stopped(0, "the same again " * 10_000))
    info = await bus.link.js.stream_info("RUN")
    assert info.state.bytes < 2000
    told = await bus.find(RunStopped, "r", 0)
    assert told is not None
    assert told.fact.detail == "the same again " * 10_000


async def test_a_fact_above_the_largest_payload_lies_in_the_blobs(bus: Bus) -> None:
    detail = secrets.token_hex(9 << 20)
    await bus.tell(stopped(0, detail))
    told = await bus.find(RunStopped, "r", 0)
    assert told is not None
    assert told.fact.detail == detail
    assert (await bus.link.js.stream_info("RUN")).state.bytes < 2000
    assert (await bus.link.js.stream_info(f"OBJ_{BLOB_STORE}")).state.bytes > 8 << 20
    with pytest.raises(AlreadyTold) as already:
        await bus.tell(stopped(0, detail))
    assert already.value.same


async def test_a_telling_before_set_up_says_what_to_do(bus_settings: BusSettings) -> None:
    hasty = msgspec.structs.replace(bus_settings, connect_timeout_s=1.0)
    async with Bus.connect(hasty, name="test") as bus:
        with pytest.raises(Refused, match="set_up"):
            await bus.tell(stopped(0))


async def test_a_key_that_is_no_subject_token_names_the_value(bus: Bus) -> None:
    with pytest.raises(BadKey, match=r"a\.b"):
        await bus.tell(stopped(0, run="a.b"))
    with pytest.raises(BadKey, match=">"):
        await bus.find(RunStopped, ">", 0)
