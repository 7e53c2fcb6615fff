"""One running sandbox: commands and files by way of the init inside it."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from openforge.sandbox.contract import ExecResult, SandboxLost, Terminal
from openforge.sandbox.inside.commands import COMMANDS
from openforge.sandbox.inside.processes import MARK
from openforge.sandbox.process.cgroups import CommandGroups
from openforge.sandbox.process.control import Control
from openforge.sandbox.process.pipes import Drain, Feed
from openforge.sandbox.process.terminal import ProcessTerminal
from openforge.sandbox.work_box import WorkBox, dies, ends_within, result_of

_DEATH_S = 10.0
_LINGER_S = 0.2  # output of a background process that outlives its command is not waited for


class ProcessSandbox(WorkBox):
    """See `openforge.sandbox.contract.Sandbox`."""

    def __init__(
        self,
        sandbox_id: str,
        isolation: Literal["full", "reduced"],
        control: Control,
        groups: CommandGroups | None,
        env: Mapping[str, str],
        bury: "Callable[[ProcessSandbox], asyncio.Future[None]]",
    ) -> None:
        super().__init__(env)
        self.id = sandbox_id
        self.isolation = isolation
        self._control = control
        self._groups = groups
        self._bury = bury

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
        number = self._control.number()
        ended, opened = self._control.expect(number), self._control.expect_terminal(number)
        inside: list[int] = []
        try:
            inside = self._kill_group(number)
            fields = [b"%d" % len(inside), *size, *self._marked(work, number)]
            await self._control.ask(b"terminal", number, fields, inside)
            pid, master = await opened
        except OSError as error:
            raise SandboxLost(f"the sandbox's control group is gone: {error.strerror}") from error
        except BaseException:
            self._end_terminal(number)
            raise
        finally:
            for fd in inside:
                os.close(fd)
        return ProcessTerminal(
            pid, master, ended, signal=lambda which: self._signal(number, which), end=lambda: self._end_terminal(number)
        )

    @property
    def alive(self) -> bool:
        return self._control.open and self._stopping is None

    async def kill_all(self) -> None:
        if self._groups:
            with contextlib.suppress(OSError):  # a group went with its last process
                self._groups.kill_commands()
        number = self._control.number()
        ended = self._control.expect(number)
        await self._control.ask(b"kill-all", number)
        if not await ends_within(ended, _DEATH_S):
            raise SandboxLost(f"processes were still there {_DEATH_S:.0f} s after they were killed")
        ended.result()

    def _begin_to_stop(self) -> "asyncio.Future[None]":
        return self._bury(self)

    async def _run(self, work: list[bytes], *, timeout_s: float, stdin: bytes, cap: int) -> ExecResult:
        began = time.monotonic()
        number = self._control.number()
        kills_before = self._memory_kills()
        ended = self._control.expect(number)
        drains, feed = await self._begin(number, work, stdin, cap)
        try:
            code, timed_out = await self._await_end(number, ended, timeout_s)
            await asyncio.wait([drain.ended for drain in drains], timeout=_LINGER_S)
        except BaseException:
            self._kill(number)
            raise
        finally:
            feed.close()
            for drain in drains:
                drain.close()
            if self._groups:
                self._groups.close_command(number)
        out, err = (drain.kept for drain in drains)
        killed = self._memory_kills() > kills_before
        return result_of(code, out, err, timed_out=timed_out, out_of_memory=killed, began=began)

    async def _begin(self, number: int, work: list[bytes], stdin: bytes, cap: int) -> tuple[list[Drain], Feed]:
        inside, outside = _pipes()
        try:
            inside += self._kill_group(number)
            await self._control.ask(b"start", number, [b"%d" % len(inside), *self._marked(work, number)], inside)
        except BaseException as error:
            for fd in outside:
                os.close(fd)
            if isinstance(error, OSError):
                raise SandboxLost(f"the sandbox's control group is gone: {error.strerror}") from error
            raise
        finally:
            for fd in inside:
                os.close(fd)
        return [Drain(outside[1], cap), Drain(outside[2], cap)], Feed(outside[0], stdin)

    def _kill_group(self, number: int) -> list[int]:
        """The way into a new kill group, where there are such; raises `OSError`."""
        return [self._groups.open_command(number)] if self._groups else []

    def _marked(self, work: list[bytes], number: int) -> list[bytes]:
        """Without kill groups, a command is known by what stands in its environment."""
        if self._groups or work[0] not in COMMANDS:
            return work
        return [*work, MARK + b"%d" % number]

    async def _signal(self, number: int, which: int) -> None:
        with contextlib.suppress(SandboxLost):  # then it has ended anyway
            await self._control.ask(b"signal", number, [b"%d" % which])

    def _end_terminal(self, number: int) -> None:
        self._kill(number)
        if self._groups:
            self._groups.close_command(number)

    async def _await_end(self, number: int, ended: "asyncio.Future[int]", timeout_s: float) -> tuple[int, bool]:
        timed_out = not await ends_within(ended, timeout_s)
        if timed_out:
            self._kill(number)
            await dies(ended, _DEATH_S)
        return ended.result(), timed_out

    def _memory_kills(self) -> int:
        return self._groups.memory_kills() if self._groups else 0

    def _kill(self, number: int) -> None:
        if self._groups:
            with contextlib.suppress(OSError):  # the group went with its last process
                self._groups.kill_command(number)
        elif self._control.open:
            asking = asyncio.ensure_future(self._control.ask(b"kill", number))
            asking.add_done_callback(lambda done: done.cancelled() or done.exception())


def _pipes() -> tuple[list[int], list[int]]:
    """(stdin, stdout, stderr) for the command, and our ends of them."""
    stdin_read, stdin_write = os.pipe()
    stdout_read, stdout_write = os.pipe()
    stderr_read, stderr_write = os.pipe()
    return [stdin_read, stdout_write, stderr_write], [stdin_write, stdout_read, stderr_read]
