"""The two ends of a command's pipes that stay outside: bytes in, bytes out, bounded.

Promises: a flood costs at most the cap in memory; the reader never blocks the loop.
"""

import asyncio
import os

from openforge.sandbox.work_box import Kept

_CHUNK = 1 << 16


class Drain:
    """Reads one pipe to its end, in the background."""

    def __init__(self, fd: int, cap: int) -> None:
        self._fd = fd
        self.kept = Kept(cap)
        self._loop = asyncio.get_running_loop()
        self.ended = self._loop.create_future()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, _CHUNK)
        except BlockingIOError:
            return
        if data:
            self.kept.add(data)
        else:
            self.close()

    def close(self) -> None:
        if not self.ended.done():
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self.ended.set_result(None)


class Feed:
    """Writes `data` to one pipe in the background, then closes it."""

    def __init__(self, fd: int, data: bytes) -> None:
        self._fd = fd
        self._left = memoryview(data)
        self._loop = asyncio.get_running_loop()
        self._open = True
        os.set_blocking(fd, False)
        self._write()
        if self._open:
            self._loop.add_writer(fd, self._write)

    def _write(self) -> None:
        try:
            while self._left:
                self._left = self._left[os.write(self._fd, self._left[:_CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            pass  # the command does not want the rest
        self.close()

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_writer(self._fd)
            os.close(self._fd)
