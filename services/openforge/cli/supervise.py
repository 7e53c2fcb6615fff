"""Keeps processes running: restarts with back-off, gives up loudly, stops cleanly.

Promises: a process that dies is started again after a growing pause; one that keeps dying, or says that
trying again is pointless, ends the whole with its last words; after `stop` none of them, nor their
children, is left.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from openforge.cli.words import last_words
from openforge.service import ends_with_us

BAD_SETTINGS = 2
ZOMBIE = 3
_LAST_LINES = 3


class GaveUp(Exception):
    """A process cannot be kept running; the message has its last words."""


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """One process: `health` is the file in which it says that it is ready, `log` takes its output. It ends with us."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log: Path
    health: Path | None = None


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """`quick_deaths` in a row, each within `quick_s` of its start, are too many."""

    quick_deaths: int = 6
    quick_s: float = 20.0
    first_pause_s: float = 0.2
    longest_pause_s: float = 10.0
    grace_s: float = 15.0


class Verdict(msgspec.Struct, frozen=True):
    pause_s: float | None
    reason: str = ""


def after_death(policy: Policy, exit_code: int, lived_s: float, quick_deaths: int) -> Verdict:
    """What follows a death: a pause before the next start, or None to give up and why.

    `quick_deaths` counts this one.
    """
    if exit_code == BAD_SETTINGS:
        return Verdict(None, "it refuses its settings")
    if exit_code == ZOMBIE:
        return Verdict(None, "another process does its work")
    if lived_s < policy.quick_s and quick_deaths >= policy.quick_deaths:
        return Verdict(None, f"it died {quick_deaths} times in a row within {policy.quick_s:g} s")
    return Verdict(min(policy.first_pause_s * 2 ** max(quick_deaths - 1, 0), policy.longest_pause_s))


class Supervised:
    """One process through all its lives."""

    def __init__(self, spec: Spec, policy: Policy, on_change: Callable[["Supervised"], None]) -> None:
        self.spec = spec
        self.state: Literal["waiting", "running", "ready", "stopped"] = "waiting"
        self.starts = 0
        self.process: asyncio.subprocess.Process | None = None
        self._policy = policy
        self._on_change = on_change
        self._stopping = asyncio.Event()

    async def keep_running(self) -> None:
        """Returns after `stop`; raises `GaveUp`."""
        quick_deaths = 0
        while not self._stopping.is_set():
            born = time.monotonic()
            exit_code = await self._live()
            if self._stopping.is_set():
                break
            lived_s = time.monotonic() - born
            quick_deaths = quick_deaths + 1 if lived_s < self._policy.quick_s else 1
            verdict = after_death(self._policy, exit_code, lived_s, quick_deaths)
            if verdict.pause_s is None:
                raise GaveUp(self._last_words(exit_code, verdict.reason))
            self._change("waiting")
            await _wait(self._stopping, verdict.pause_s)
        self._change("stopped")

    async def _live(self) -> int:
        self.starts += 1
        if self.spec.health is not None:
            self.spec.health.unlink(missing_ok=True)
        with self.spec.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.spec.argv,
                env=dict(self.spec.env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=ends_with_us(),
            )
        if self._stopping.is_set():  # while it was being started
            await self.stop()
        self._change("running")
        watcher = asyncio.create_task(self._watch_health())
        try:
            return await self.process.wait()
        finally:
            watcher.cancel()
            _signal_group(self.process.pid, signal.SIGKILL)

    async def _watch_health(self) -> None:
        if self.spec.health is None:
            self._change("ready")
            return
        while not _is_ready(self.spec.health):
            await asyncio.sleep(0.1)
        self._change("ready")

    async def stop(self) -> None:
        self._stopping.set()
        process = self.process
        if process is None or process.returncode is not None:
            return
        _signal(process, signal.SIGTERM)
        try:
            async with asyncio.timeout(self._policy.grace_s):
                await process.wait()
        except TimeoutError:
            _signal_group(process.pid, signal.SIGKILL)
            await process.wait()

    def _change(self, state: Literal["waiting", "running", "ready", "stopped"]) -> None:
        if state != self.state:
            self.state = state
            self._on_change(self)

    def _last_words(self, exit_code: int, reason: str) -> str:
        *before, last = last_words(self.spec.log, _LAST_LINES) or ["it said nothing"]
        said = f"{self.spec.name} ended with exit code {exit_code}: {reason}; it said: {last}"
        return "\n".join((f"{said} (log {self.spec.log})", *(f"  before that: {line}" for line in before)))


class Supervisor:
    """A set of processes, started in order, stopped in the reverse order."""

    def __init__(
        self,
        specs: Sequence[Spec],
        *,
        policy: Policy = Policy(),
        on_change: Callable[[Supervised], None] = lambda _: None,
    ) -> None:
        self.processes = [Supervised(spec, policy, on_change) for spec in specs]

    async def run(self) -> None:
        """Keeps all of them running until `stop`; raises `GaveUp` of the first that cannot be kept."""
        try:
            async with asyncio.TaskGroup() as group:
                for process in self.processes:
                    group.create_task(process.keep_running(), name=process.spec.name)
        except* GaveUp as gave_up:
            raise gave_up.exceptions[0] from None
        except* OSError as errors:
            raise GaveUp(f"its processes cannot be kept running: {errors.exceptions[0]}") from errors
        finally:
            await self.stop()

    async def ready(self) -> None:
        """Returns when every process has said once that it is ready."""
        while any(process.state not in ("ready", "stopped") for process in self.processes):
            await asyncio.sleep(0.1)

    async def stop(self) -> None:
        for process in reversed(self.processes):
            process._stopping.set()
        await asyncio.gather(*(process.stop() for process in reversed(self.processes)))

    def __getitem__(self, name: str) -> Supervised:
        return next(process for process in self.processes if process.spec.name == name)


def service_argv(service: str, python: str = sys.executable) -> tuple[str, ...]:
    return (python, "-m", f"openforge.{service}")


def _is_ready(health: Path) -> bool:
    try:
        return bool(msgspec.json.decode(health.read_bytes()).get("ready"))
    except (FileNotFoundError, msgspec.DecodeError):
        return False


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
