"""Workers handle each message to its end."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from bus_examples import paused, stopped
from opentelemetry import trace

from openforge.bus import Bus, BusSettings, Told, TooManyDeliveries, Zombie
from openforge.bus.consumer import Consumer
from openforge.bus.inbox import status_of
from openforge.protos import Fact, RunPaused, RunStopped


@asynccontextmanager
async def working(bus: Bus, handler: Callable[[Told[Any]], AsyncIterator[Fact]], **options: Any) -> AsyncIterator[None]:
    options = {"service": "w", "fact": RunStopped, "retry_s": 0.05, **options}
    task = asyncio.create_task(bus.work(handler=handler, **options))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(done: Callable[[], Any], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await done():
            await asyncio.sleep(0.02)


async def answer(told: Told[RunStopped]) -> AsyncIterator[Fact]:
    yield paused(told.fact.generation, run=told.fact.run)


async def test_what_a_handler_yields_is_told_before_its_next_line_runs(bus: Bus) -> None:
    found: list[bool] = []

    async def handle(told: Told[RunStopped]) -> AsyncIterator[Fact]:
        yield paused(told.fact.generation)
        found.append(await bus.find(RunPaused, "r", told.fact.generation) is not None)

    async with working(bus, handle):
        await bus.tell(stopped(7))
        await until(lambda: asyncio.sleep(0, bool(found)))
    assert found == [True]


async def test_a_worker_takes_only_the_facts_of_its_run(bus: Bus) -> None:
    await bus.tell_all([stopped(0, run="r"), stopped(0, run="s")])
    async with working(bus, answer, run="s"):
        await until(lambda: bus.find(RunPaused, "s", 0))
        await asyncio.sleep(0.1)
    assert await bus.find(RunPaused, "r", 0) is None
    assert {info.name for info in await bus.link.js.consumers_info("RUN")} == {"w-RunStopped-s"}


async def test_two_workers_of_one_service_share_the_work(bus: Bus, bus_settings: BusSettings) -> None:
    handled: list[tuple[str, int]] = []

    def by(name: str) -> Callable[[Told[RunStopped]], AsyncIterator[Fact]]:
        async def handle(told: Told[RunStopped]) -> AsyncIterator[Fact]:
            handled.append((name, told.fact.generation))
            await asyncio.sleep(0.02)
            yield paused(told.fact.generation)

        return handle

    async with Bus.connect(bus_settings, name="second") as second:
        async with working(bus, by("one"), in_flight=2), working(second, by("two"), in_flight=2):
            await bus.tell_all([stopped(n) for n in range(40)])
            await until(lambda: asyncio.sleep(0, len(handled) >= 40))
    assert sorted(generation for _, generation in handled) == list(range(40))
    assert {name for name, _ in handled} == {"one", "two"}


async def test_no_more_than_in_flight_are_handled_at_once(bus: Bus) -> None:
    now, most, ended = 0, 0, 0

    async def handle(told: Told[RunStopped]) -> AsyncIterator[Fact]:
        nonlocal now, most, ended
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.02)
        now -= 1
        ended += 1
        return
        yield

    async with working(bus, handle, in_flight=3):
        await bus.tell_all([stopped(n) for n in range(30)])
        await until(lambda: asyncio.sleep(0, ended == 30))
    assert most == 3


async def test_heartbeats_keep_the_message_of_a_long_handler(bus: Bus, bus_settings: BusSettings) -> None:
    handled: list[int] = []

    async def handle(told: Told[RunStopped]) -> AsyncIterator[Fact]:
        handled.append(told.deliveries)
        await asyncio.sleep(2.0)
        yield paused(0)

    async with Bus.connect(bus_settings, name="second") as second:
        async with working(bus, handle, ack_wait_s=0.5), working(second, handle, ack_wait_s=0.5):
            await bus.tell(stopped(0))
            await until(lambda: bus.find(RunPaused, "r", 0))
            await asyncio.sleep(0.7)
    assert handled == [1]


async def test_a_message_whose_worker_died_is_delivered_again(bus: Bus, bus_settings: BusSettings) -> None:
    handled: list[int] = []

    async def hang(told: Told[RunStopped]) -> AsyncIterator[Fact]:
        handled.append(told.deliveries)
        await asyncio.Event().wait()
        yield paused(0)

    async def handle(told: Told[RunStopped]) -> AsyncIterator[Fact]:
        handled.append(told.deliveries)
        yield paused(0)

    await bus.tell(stopped(0))
    async with Bus.connect(bus_settings, name="dying") as dying:
        task = asyncio.create_task(dying.work(service="w", fact=RunStopped, handler=hang, ack_wait_s=0.5))
        await until(lambda: asyncio.sleep(0, bool(handled)))
        dying.link.client._transport.close()  # as a killed process: no word to the server
        await dying.link.close()
        await asyncio.gather(task, return_exceptions=True)
    async with working(bus, handle, ack_wait_s=0.5):
        await until(lambda: bus.find(RunPaused, "r", 0))
    assert handled == [1, 2]


async def test_a_handler_that_fails_is_tried_again_and_then_its_message_is_dead(bus: Bus) -> None:
    deliveries: list[int] = []

    async def handle(told: Told[RunStopped]) -> AsyncIterator[Fact]:
        deliveries.append(told.deliveries)
        if told.fact.generation == 0:
            raise ValueError("no way to do this")
        yield paused(told.fact.generation)

    await bus.tell_all([stopped(0), stopped(1)])
    async with working(bus, handle, attempts=3, in_flight=1):
        await until(bus.dead_letters)
        await until(lambda: bus.find(RunPaused, "r", 1))
        await asyncio.sleep(0.3)
    [letter] = await bus.dead_letters("w")
    assert (letter.reason, letter.subject, letter.deliveries) == ("handler failed", stopped(0).subject(), 3)
    assert letter.detail.endswith("ValueError: no way to do this")
    assert RunStopped.decode(letter.original) == stopped(0)
    assert sorted(deliveries) == [1, 1, 2, 3]


async def test_on_dead_tells_what_follows_from_the_death(bus: Bus) -> None:
    errors: list[Exception] = []

    async def handle(told: Told[RunStopped]) -> AsyncIterator[Fact]:
        raise ValueError("no")
        yield

    async def on_dead(told: Told[RunStopped], error: Exception) -> AsyncIterator[Fact]:
        errors.append(error)
        yield paused(told.fact.generation)

    await bus.tell(stopped(0))
    async with working(bus, handle, attempts=1, on_dead=on_dead):
        await until(lambda: bus.find(RunPaused, "r", 0))
    assert [type(error) for error in errors] == [ValueError]


async def test_a_message_that_kills_its_worker_again_and_again_is_dead(bus: Bus) -> None:
    async def hang(told: Told[RunStopped]) -> AsyncIterator[Fact]:
        await asyncio.Event().wait()
        yield

    errors: list[Exception] = []

    async def on_dead(told: Told[RunStopped], error: Exception) -> AsyncIterator[Fact]:
        errors.append(error)
        yield paused(0)

    await bus.tell(stopped(0))
    consumer = "w-RunStopped"
    for death in range(2):
        async with working(bus, hang, attempts=2):
            await until(lambda death=death: _delivered(bus, consumer, death + 1))
    async with working(bus, hang, attempts=2, on_dead=on_dead):
        await until(lambda: bus.find(RunPaused, "r", 0))
    assert [type(error) for error in errors] == [TooManyDeliveries]
    assert [letter.reason for letter in await bus.dead_letters()] == ["too many deliveries"]


async def _delivered(bus: Bus, consumer: str, times: int) -> bool:
    infos = await bus.link.js.consumers_info("RUN")
    return any(info.name == consumer and info.delivered.consumer_seq >= times for info in infos)


@pytest.mark.parametrize("payload", [b"\xff\xfe nonsense", b"", stopped(5).encode(), paused(0).encode()])
async def test_a_message_that_is_no_fact_of_its_subject_is_dead_at_once(bus: Bus, payload: bytes) -> None:
    await bus.link.js.publish("of.r.run.stopped.0", payload)
    await bus.tell(stopped(1))
    async with working(bus, answer):
        await until(bus.dead_letters)
        await until(lambda: bus.find(RunPaused, "r", 1))
    [letter] = await bus.dead_letters()
    assert (letter.reason, letter.original, letter.deliveries) == ("undecodable", payload, 1)
    assert (letter.stream, letter.sequence) == ("RUN", 1)


async def test_a_worker_that_is_cancelled_gives_back_what_it_holds(bus: Bus, bus_settings: BusSettings) -> None:
    begun = asyncio.Event()
    cleaned: list[bool] = []

    async def hang(told: Told[RunStopped]) -> AsyncIterator[Fact]:
        begun.set()
        try:
            await asyncio.Event().wait()
            yield
        finally:
            cleaned.append(True)

    await bus.tell(stopped(0))
    async with working(bus, hang, ack_wait_s=60.0):
        await begun.wait()
    assert cleaned == [True]
    async with working(bus, answer, ack_wait_s=60.0):
        await until(lambda: bus.find(RunPaused, "r", 0), timeout_s=5.0)


async def test_a_worker_ends_although_its_handler_swallowed_the_cancellation(bus: Bus) -> None:
    began = asyncio.Event()

    async def stubborn(told: Told[RunStopped]) -> AsyncIterator[Fact]:
        began.set()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return
        yield

    await bus.tell(stopped(0))
    task = asyncio.create_task(bus.work(service="test", fact=RunStopped, handler=stubborn, in_flight=1))
    async with asyncio.timeout(10):
        await began.wait()
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=10)
    assert done


async def test_the_first_telling_wins_and_the_handler_goes_on(bus: Bus) -> None:
    await bus.tell(paused(0))
    ended = asyncio.Event()

    async def handle(told: Told[RunStopped]) -> AsyncIterator[Fact]:
        yield paused(0)
        ended.set()

    await bus.tell(stopped(0))
    async with working(bus, handle):
        async with asyncio.timeout(5):
            await ended.wait()
    assert await bus.dead_letters() == []


async def test_a_zombie_ends_all_the_work_loudly(bus: Bus) -> None:
    async def handle(told: Told[RunStopped]) -> AsyncIterator[Fact]:
        raise Zombie("somebody else does this")
        yield

    await bus.tell(stopped(0))
    with pytest.raises(ExceptionGroup) as ended:
        async with asyncio.timeout(5):
            await bus.work(service="w", fact=RunStopped, handler=handle)
    assert ended.group_contains(Zombie)


async def test_a_worker_whose_consumer_was_deleted_makes_it_again(bus: Bus) -> None:
    async with working(bus, answer, in_flight=2):
        await bus.tell(stopped(0))
        await until(lambda: bus.find(RunPaused, "r", 0))
        await bus.link.js.delete_consumer("RUN", "w-RunStopped")
        await bus.tell(stopped(1))
        await until(lambda: bus.find(RunPaused, "r", 1))


async def test_a_pull_that_nobody_hears_is_no_message(bus: Bus) -> None:
    await bus.tell(stopped(0))
    consumer = Consumer(bus.link, "RUN", "not-made", {})
    async with bus.link.inbox() as inbox:
        await consumer.pull(inbox, batch=1)
        arrived = await inbox.next(5.0)
    assert arrived is not None
    assert status_of(arrived[1]) == "503"


async def test_a_handler_goes_on_with_the_trace_of_whoever_told_the_fact(bus: Bus) -> None:
    seen: list[int] = []

    async def handle(told: Told[RunStopped]) -> AsyncIterator[Fact]:
        seen.append(trace.get_current_span().get_span_context().trace_id)
        yield paused(0)

    context = trace.SpanContext(trace_id=0xABC, span_id=0xDEF, is_remote=False)
    with trace.use_span(trace.NonRecordingSpan(context)):
        await bus.tell(stopped(0))
    async with working(bus, handle):
        await until(lambda: bus.find(RunPaused, "r", 0))
    assert seen == [0xABC]
