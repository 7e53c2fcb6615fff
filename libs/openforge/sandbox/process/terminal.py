"""Our end of a terminal inside a sandbox.

Promises: what nobody reads stays in the sandbox (the command stops at a full terminal), the loop never blocks,
and the descriptor is closed exactly once.
"""

import asyncio
import contextlib
import fcntl
import os
import struct
import termios
from collections.abc import Awaitable, Callable

from openforge.sandbox.work_box import within_window

_CHUNK = 1 << 16
_MOST_BUFFERED = 1 << 20
_LINGER_S = 0.2  # the last words of a command whose children keep the terminal


class ProcessTerminal:
    """See `openforge.sandbox.contract.Terminal`."""

    def __init__(
        self,
        pid: int,
        fd: int,
        ended: "asyncio.Future[int]",
        *,
        signal: Callable[[int], Awaitable[None]],
        end: Callable[[], None],
    ) -> None:
        self.pid = pid
        self._fd = fd
        self._ended = ended
        self._signal = signal
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._output = bytearray()
        self._news = asyncio.Event()
        self._silent = False
        self._closed = False
        self._reading = False
        os.set_blocking(fd, False)
        self._listen()
        ended.add_done_callback(self._on_ended)

    async def read(self) -> bytes:
        while not self._output and not self._silent:
            self._news.clear()
            await self._news.wait()
        data = bytes(self._output)
        self._output.clear()
        self._listen()
        return data

    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self._closed and not self._ended.done():
            try:
                view = view[os.write(self._fd, view[:_CHUNK]) :]
            except BlockingIOError:
                await self._until_writable()
            except OSError:
                return  # nobody holds the other end any more

    def resize(self, rows: int, cols: int) -> None:
        if not self._closed:
            size = struct.pack("HHHH", within_window(rows), within_window(cols), 0, 0)
            with contextlib.suppress(OSError):
                fcntl.ioctl(self._fd, termios.TIOCSWINSZ, size)

    async def signal(self, number: int) -> None:
        if not self._ended.done():
            await self._signal(number)

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    async def close(self) -> None:
        if not self._closed:
            self._end()
            self._hang_up()

    # -- reading

    def _listen(self) -> None:
        """Read on while there is room."""
        if not self._reading and not self._silent and not self._closed and len(self._output) < _MOST_BUFFERED:
            self._reading = True
            self._loop.add_reader(self._fd, self._hear)

    def _hear(self) -> None:
        try:
            data = os.read(self._fd, _CHUNK)
        except BlockingIOError:
            return
        except OSError:  # the kernel's word for "nobody has the other end open"
            data = b""
        if not data:
            self._fall_silent()
            return
        self._output += data
        if len(self._output) >= _MOST_BUFFERED:
            self._pause()
        self._news.set()

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def _fall_silent(self) -> None:
        self._pause()
        self._silent = True
        self._news.set()

    def _on_ended(self, ended: "asyncio.Future[int]") -> None:
        ended.cancelled() or ended.exception()  # a sandbox that is lost is no news to whoever did not ask
        self._loop.call_later(_LINGER_S, self._fall_silent_if_idle)

    def _fall_silent_if_idle(self) -> None:
        """Its children may hold the terminal for ever: what they say after its end belongs to nobody."""
        if not self._closed and not self._silent:
            if len(self._output) >= _MOST_BUFFERED:
                self._loop.call_later(_LINGER_S, self._fall_silent_if_idle)
            else:
                self._fall_silent()

    def _hang_up(self) -> None:
        self._fall_silent()
        self._closed = True
        os.close(self._fd)

    async def _until_writable(self) -> None:
        writable = self._loop.create_future()

        def wake() -> None:
            if not writable.done():
                writable.set_result(None)

        self._loop.add_writer(self._fd, wake)
        try:
            await asyncio.wait({writable, self._ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not self._closed:
                self._loop.remove_writer(self._fd)
