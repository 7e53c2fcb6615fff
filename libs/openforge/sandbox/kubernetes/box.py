"""One running sandbox that is a pod: commands, files and terminals by execs of our own program inside it."""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from openforge.sandbox.contract import ExecResult, SandboxLost, Terminal
from openforge.sandbox.inside.commands import COMMANDS
from openforge.sandbox.inside.frames import frame
from openforge.sandbox.inside.processes import MARK
from openforge.sandbox.kubernetes.stream import Ended, Order, Stream
from openforge.sandbox.work_box import Kept, WorkBox, dies, ends_within, result_of, size_of

_DEATH_S = 30.0
_MOST_UNREAD = 1 << 20


class KubernetesSandbox(WorkBox):
    """See `openforge.sandbox.contract.Box`. `end` removes the pod."""

    isolation: Literal["full", "reduced"] = "full"

    def __init__(
        self,
        pod: str,
        namespace: str,
        configuration: Any,
        env: Mapping[str, str],
        end: "Callable[[KubernetesSandbox], asyncio.Future[None]]",
    ) -> None:
        super().__init__(env)
        self.id = pod
        self._namespace = namespace
        self._configuration = configuration
        self._end = end
        self._number = 0
        self._streams: set[Stream] = set()
        self._why_lost = ""

    @property
    def alive(self) -> bool:
        return not self._why_lost and self._stopping is None

    def lose(self, why: str) -> None:
        """The pod is gone: whoever waits for it learns why."""
        self._why_lost = self._why_lost or why
        for stream in list(self._streams):
            if not stream.ended.done():
                stream.ended.set_exception(SandboxLost(f"{self.id}: {self._why_lost}"))
            stream.close()

    async def terminal(
        self,
        command: str | Sequence[str],
        *,
        rows: int = 24,
        cols: int = 80,
        cwd: str = "/workspace",
        env: Mapping[str, str] | None = None,
    ) -> Terminal:
        work, size = self._work_on_terminal(command, cwd, env, rows, cols)
        screen = Screen(asyncio.get_running_loop())
        number, stream = self._begin([b"terminal", *size, *work], b"", screen.put, screen.tell)
        told = screen.pid
        either: set[asyncio.Future[Any]] = {told, stream.ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not told.done():
            await self._kill(number)
            raise stream.ended.exception() or SandboxLost(f"{self.id}: the sandbox has no terminal left")
        return PodTerminal(told.result(), stream, screen, lambda: self._kill(number))

    async def kill_all(self) -> None:
        await self._plain([b"kill-all"])

    def _begin_to_stop(self) -> "asyncio.Future[None]":
        stopping = self._end(self)
        self.lose("it was stopped")
        return stopping

    async def _run(self, work: list[bytes], *, timeout_s: float, stdin: bytes, cap: int) -> ExecResult:
        began = time.monotonic()
        out, err = Kept(cap), Kept(cap)
        number, stream = self._begin(work, stdin, out.add, err.add)
        try:
            ended, timed_out = await self._await_end(number, stream, timeout_s)
        except BaseException:
            stream.close()
            killing = asyncio.ensure_future(self._kill(number))
            killing.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise
        killed = ended.memory_kills > 0
        return result_of(ended.code, out, err, timed_out=timed_out, out_of_memory=killed, began=began)

    def _begin(
        self, work: list[bytes], stdin: bytes, out: Callable[[bytes], None], err: Callable[[bytes], None]
    ) -> tuple[int, Stream]:
        if not self.alive:
            raise SandboxLost(f"{self.id}: {self._why_lost or 'it was stopped'}")
        self._number += 1
        number = self._number
        marked = [*work, MARK + b"%d" % number] if work[0] in (*COMMANDS, b"terminal") else work
        order = Order(number, marked, stdin, out, err)
        stream = Stream(self._configuration, self._namespace, self.id, order)
        self._streams.add(stream)
        stream.ended.add_done_callback(lambda _: self._streams.discard(stream))
        return number, stream

    async def _await_end(self, number: int, stream: Stream, timeout_s: float) -> tuple[Ended, bool]:
        timed_out = not await ends_within(stream.ended, timeout_s)
        if timed_out:
            await self._kill(number)
            await dies(stream.ended, _DEATH_S)
        return stream.ended.result(), timed_out

    async def _kill(self, number: int) -> None:
        """The command `number` and what it started."""
        if self.alive:
            await self._plain([b"kill"], number)

    async def _plain(self, work: list[bytes], number: int = 0) -> None:
        order = Order(number, work, b"", _drop, _drop)
        if not self.alive:
            raise SandboxLost(f"{self.id}: {self._why_lost or 'it was stopped'}")
        stream = Stream(self._configuration, self._namespace, self.id, order)
        self._streams.add(stream)
        try:
            async with asyncio.timeout(_DEATH_S):
                await asyncio.shield(stream.ended)
        except TimeoutError:
            raise SandboxLost(f"{self.id}: nothing was ended within {_DEATH_S:.0f} s") from None
        finally:
            self._streams.discard(stream)
            stream.close()


def _drop(data: bytes) -> None:
    return None


class Screen:
    """What a terminal said and nobody has read yet: bounded, the stream's thread waits where it is full."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._room = threading.Event()
        self._room.set()
        self.output = bytearray()
        self.news = asyncio.Event()
        self.pid: asyncio.Future[int] = loop.create_future()
        self.closed = False

    def put(self, data: bytes) -> None:
        """In the stream's thread."""
        while not self.closed and not self._room.wait(0.5):
            pass
        self._loop.call_soon_threadsafe(self._keep, data)

    def _keep(self, data: bytes) -> None:
        self.output += data
        if len(self.output) >= _MOST_UNREAD:
            self._room.clear()
        self.news.set()

    def tell(self, data: bytes) -> None:
        """In the stream's thread: the process number, as text."""
        if data.strip().isdigit():
            self._loop.call_soon_threadsafe(self._know, int(data))

    def _know(self, pid: int) -> None:
        if not self.pid.done():
            self.pid.set_result(pid)

    def take(self) -> bytes:
        data = bytes(self.output)
        self.output.clear()
        self._room.set()
        return data


class PodTerminal:
    """See `openforge.sandbox.contract.Terminal`."""

    def __init__(self, pid: int, stream: Stream, screen: Screen, kill: "Callable[[], Any]") -> None:
        self.pid = pid
        self._stream = stream
        self._screen = screen
        self._kill = kill
        self._closed = False
        stream.ended.add_done_callback(lambda _: screen.news.set())

    async def read(self) -> bytes:
        while not self._screen.output and not self._stream.ended.done() and not self._closed:
            self._screen.news.clear()
            await self._screen.news.wait()
        return self._screen.take()

    async def write(self, data: bytes) -> None:
        await self._say(b"data", data)

    def resize(self, rows: int, cols: int) -> None:
        self._stream.send(frame(b"size", *size_of(rows, cols)))

    async def signal(self, number: int) -> None:
        await self._say(b"signal", b"%d" % number)

    async def wait(self) -> int:
        return (await asyncio.shield(self._stream.ended)).code

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = self._screen.closed = True
        self._screen.news.set()
        if not self._stream.ended.done():
            with suppress(SandboxLost):
                await self._kill()
        self._stream.close()

    async def _say(self, *fields: bytes) -> None:
        if not self._closed and not self._stream.ended.done():
            await asyncio.to_thread(self._stream.send, frame(*fields))
