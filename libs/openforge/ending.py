"""Ending what was started: tasks, and processes with the one that started them.

Imports nothing of ours: environments and what runs inside sandboxes come this way too.
"""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

_PR_SET_PDEATHSIG = 1
_GONE = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None


async def cancel(*tasks: "asyncio.Task[Any]", again_s: float = 20.0) -> None:
    """Cancel until all have ended, which one call of `Task.cancel` does not promise: Python 3.11's `wait_for` forgets a
    cancellation that comes together with what it waits for, and what loops around it would be waited for in vain.

    Nothing that a task ended with is raised. `again_s` has to be longer than any of them cleans up, for that would be
    cut short. A `TaskGroup` passes on the first cancellation alone: below one, nothing may forget it.
    """
    waiting = {task for task in tasks if not task.done()}
    while waiting:
        for task in waiting:
            task.cancel()
        _, waiting = await asyncio.wait(waiting, timeout=again_s)


def ends_with_us(by: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """A `preexec_fn`: the child gets the signal when the thread that starts it ends, and does not begin where that has
    ended by then. On Linux; elsewhere the parent has to see to it.

    Nothing is imported or loaded in the child, since other threads may have held locks as it was forked.
    """
    us = os.getpid()
    return lambda: _end_with(us, by)


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """This process gets the signal when its parent ends. One whose parent ended before this call does not notice:
    where both are ours, whoever starts it says `ends_with_us`."""
    _end_with(os.getppid(), by)


def _end_with(parent: int, by: signal.Signals) -> None:
    if _libc is None:
        return
    _libc.prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:
        os._exit(_GONE)
