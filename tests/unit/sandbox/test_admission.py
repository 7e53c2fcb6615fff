"""Who may make a sandbox next, and who is sent away."""

import asyncio

import pytest

from openforge.sandbox.admission import NORMAL, SPARE, URGENT, Admission, Busy


async def test_the_most_urgent_is_next_then_the_oldest() -> None:
    admission = Admission(at_once=1, waiting=10)
    order: list[str] = []
    held = asyncio.Event()

    async def make(name: str, priority: int) -> None:
        async with admission.turn(priority):
            order.append(name)
            await held.wait()

    first = asyncio.create_task(make("first", SPARE))
    await asyncio.sleep(0)
    tasks = []
    for name, priority in (("spare", SPARE), ("old", NORMAL), ("new", NORMAL), ("urgent", URGENT)):
        tasks.append(asyncio.create_task(make(name, priority)))
        await asyncio.sleep(0)
    assert admission.waiting == 4
    held.set()
    await asyncio.gather(first, *tasks)
    assert order == ["first", "urgent", "old", "new", "spare"]


async def test_who_comes_when_too_many_wait_is_told_when_to_come_back() -> None:
    admission = Admission(at_once=1, waiting=1, retry_after_s=7.0)
    async with admission.turn():
        waiting = asyncio.create_task(admission.turn().__aenter__())
        await asyncio.sleep(0)
        with pytest.raises(Busy) as busy:
            await admission.turn().__aenter__()
        assert busy.value.retry_after_s == 7.0
        waiting.cancel()


async def test_who_gives_up_waiting_leaves_no_gap_and_loses_no_place() -> None:
    admission = Admission(at_once=1, waiting=10)
    turn = admission.turn()
    await turn.__aenter__()
    impatient = [asyncio.create_task(admission.turn().__aenter__()) for _ in range(3)]
    await asyncio.sleep(0)
    impatient[0].cancel()
    impatient[1].cancel()
    await turn.__aexit__(None, None, None)
    impatient[2].cancel()  # it has been given the place, and has not run yet
    await asyncio.wait(impatient)
    async with asyncio.timeout(5):
        async with admission.turn():
            assert admission.waiting == 0
