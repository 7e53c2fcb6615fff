"""Processes that end with the one that started them: on Linux by the kernel, elsewhere the parent has to see to it."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_GONE = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None


def ends_with_us(by: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """A `preexec_fn`: the child gets the signal when the thread that starts it ends, and does not begin where that has
    ended by then. Nothing is imported or loaded in the child, since other threads may have held locks as it was forked.
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
