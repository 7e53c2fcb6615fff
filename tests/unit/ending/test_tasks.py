import asyncio

import pytest

from openforge.ending import cancel


async def test_a_task_that_forgets_a_cancellation_is_cancelled_again() -> None:
    forgotten = 0

    async def forgets() -> None:
        nonlocal forgotten
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if forgotten == 2:
                    raise
                forgotten += 1

    task = asyncio.create_task(forgets())
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await cancel(task, again_s=0.01)
    assert task.cancelled()
    assert forgotten == 2


async def test_a_task_has_time_to_clean_up_and_what_it_ended_with_stays_with_it() -> None:
    async def cleans_up() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            raise ValueError("not clean")

    async def has_ended() -> None:
        pass

    tasks = asyncio.create_task(cleans_up()), asyncio.create_task(has_ended())
    await asyncio.sleep(0)
    await cancel(*tasks)
    with pytest.raises(ValueError, match="not clean"):
        tasks[0].result()
    assert tasks[1].result() is None
