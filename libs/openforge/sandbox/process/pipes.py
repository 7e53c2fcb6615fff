"""The two ends of a command's pipes that stay outside: bytes in, bytes out, bounded.

Promises: a flood costs at most the cap in memory; of more output than the cap the first and the last half
are kept; the reader never blocks the loop.
"""

import asyncio
import os

_CHUNK = 1 << 16


class Drain:
    """Reads one pipe to its end, in the background."""

    def __init__(self, fd: int, cap: int) -> None:
        self._fd = fd
        self._head_left = cap - cap // 2
        self._tail_cap = cap // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.truncated = False
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
            self._keep(data)
        else:
            self.close()

    def _keep(self, data: bytes) -> None:
        fits = min(self._head_left, len(data))
        self._head += data[:fits]
        self._head_left -= fits
        self._tail += data[fits:]
        if len(self._tail) > self._tail_cap:
            self.truncated = True
            del self._tail[: len(self._tail) - self._tail_cap]

    def close(self) -> None:
        if not self.ended.done():
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self.ended.set_result(None)

    @property
    def data(self) -> bytes:
        return bytes(self._head + self._tail)


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
