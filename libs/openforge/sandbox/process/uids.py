"""Host users for sandboxes: one for each, never shared by two that live at once.

Promises: a block of users belongs to one driver on this host as long as its process lives, by a file
lock; within a block the user that rested longest is taken next.
"""

import fcntl
import os
from collections import deque
from pathlib import Path

_FIRST, _BLOCK, _BLOCKS = 70_000, 1_000, 30


class NoUsers(Exception):
    """All users are taken; the text says where."""


class UserBlock:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._fd, number = _lock_one(folder)
        first = _FIRST + number * _BLOCK
        self._free = deque(range(first, first + _BLOCK))

    def take(self) -> int:
        if not self._free:
            raise NoUsers(f"all {_BLOCK} users of this driver's block hold a sandbox")
        return self._free.popleft()

    def give_back(self, uid: int) -> None:
        self._free.append(uid)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _lock_one(folder: Path) -> tuple[int, int]:
    for number in range(_BLOCKS):
        fd = os.open(folder / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        return fd, number
    raise NoUsers(f"all {_BLOCKS} blocks of users in {folder} are locked by living drivers")
