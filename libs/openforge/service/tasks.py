"""Ending tasks."""

import asyncio
from typing import Any


async def cancel(*tasks: "asyncio.Task[Any]", again_s: float = 10.0) -> None:
    """Cancel until all have ended, which one call of `Task.cancel` does not promise: Python 3.11's `wait_for` forgets a
    cancellation that comes together with what it waits for, and what loops around it would be waited for in vain.

    Nothing that a task ended with is raised. `again_s` is how long a task may clean up before it is cancelled again.
    """
    waiting = {task for task in tasks if not task.done()}
    while waiting:
        for task in waiting:
            task.cancel()
        _, waiting = await asyncio.wait(waiting, timeout=again_s)
