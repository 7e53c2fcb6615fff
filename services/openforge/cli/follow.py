"""Watching a run until it is over: a fold of its facts beside whatever may end it first.

Promises: whoever watches ends nothing by that; what it returns is why the run is over for the watcher.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable

import msgspec

from openforge.bus import CAUGHT_UP, Bus
from openforge.cli.supervise import Supervised
from openforge.protos import StopReason
from openforge.runs import RunConfig
from openforge.runs.progress import FOLDED, Progress
from openforge.service import cancel


class Watch(msgspec.Struct, kw_only=True):
    """What a display may look at while a run goes on. `note` ends it; a `remark` does not; `parting` says what Ctrl-C
    does. `bus_gone`: the server was given up, so nothing can be told any more. `caught_up`: all that was told before we
    came is folded; until then nobody can say whether the run stands still."""

    progress: Progress
    processes: list[Supervised]
    caught_up: bool = False
    note: str = ""
    bus_gone: bool = False
    remark: str = ""
    parting: str = "Ctrl-C stops everything; the same command resumes"


async def until_over(
    bus: Bus, config: RunConfig, watch: Watch, look: Callable[[Watch], None], stopped: asyncio.Event
) -> tuple[StopReason, str]:
    """Follow the run until it is finished, stopped, given up or stuck."""
    following = asyncio.create_task(_follow(bus, config, watch))
    stopping = asyncio.create_task(stopped.wait())
    try:
        while True:
            await asyncio.wait({following, stopping}, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
            look(watch)
            if watch.note:
                return StopReason.FAILED, watch.note
            if following.done():
                return following.result()
            if stopped.is_set():
                return StopReason.INTERRUPTED, "asked to stop"
            if watch.caught_up and (why := watch.progress.stuck(config, time.time())):
                return StopReason.NO_PROGRESS, why
    finally:
        await cancel(following, stopping)


async def _follow(bus: Bus, config: RunConfig, watch: Watch) -> tuple[StopReason, str]:
    """Fold the run's facts until they say that it is finished or that somebody stopped it."""
    async for told in bus.follow(FOLDED, run=config.run.name):
        if told is CAUGHT_UP:
            watch.caught_up = True
        else:
            watch.progress.apply(told.fact, told.at)
        if watch.caught_up and watch.progress.finished(config):
            return StopReason.COMPLETED, ""
        if watch.caught_up and watch.progress.state.phase == "stopped":
            return StopReason.INTERRUPTED, "a client stopped it"
    raise AssertionError("following a live stream does not end")


class signals:  # noqa: N801
    """Ctrl-C and SIGTERM set the event; a second one ends us at once."""

    def __init__(self, stopped: asyncio.Event) -> None:
        self._stopped = stopped

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._heard)

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)

    def _heard(self) -> None:
        if self._stopped.is_set():
            os._exit(130)
        self._stopped.set()
