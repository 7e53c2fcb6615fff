"""`openforge train --remote`: a run on a deployment that works already.

Promises: nothing is started here; leaving changes nothing there, so Ctrl-C detaches and the same command comes back;
whoever follows a run to its end, or sees that it stands still, says so on the bus.
"""

import asyncio
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec

from openforge.bus import BadSettings, Bus, BusSettings
from openforge.cli.conduct import Outcome
from openforge.cli.finish import numbers_now
from openforge.cli.follow import Watch, signals, until_over
from openforge.protos import StopReason
from openforge.runs import RunConfig, state_of, stop_run
from openforge.runs.progress import SUBMITTED, Progress
from openforge.runs.submit import join

UNTOUCHED_S = 45.0
_CONNECT_S = 10.0


class Detached(Exception):
    """We left, the run goes on; the message says how to come back and how to end it."""

    def __init__(self, run: str, url: str) -> None:
        super().__init__(
            f"detached: run {run!r} goes on at {url}; the same command follows it again, "
            f"and `OPENFORGE_NATS_URL={url} openforge stop {run}` ends it"
        )


def settings_for(url: str) -> BusSettings:
    """The environment's credentials for the bus at `url`; raises `BadSettings`."""
    for server in url.split(","):
        parts = urlsplit(server.strip())
        if parts.scheme not in ("nats", "tls") or not parts.hostname:
            raise BadSettings(f"--remote {url!r} is no bus: use nats://HOST:PORT, or tls://HOST:PORT")
    settings = BusSettings.from_env()
    return msgspec.structs.replace(settings, url=url, connect_timeout_s=min(settings.connect_timeout_s, _CONNECT_S))


async def conduct_remotely(config: RunConfig, settings: BusSettings, look: Callable[[Watch], None]) -> Outcome:
    """Submit the run, or join it where it works already, and return when it is over; raises `Detached`."""
    run, stopped = config.run.name, asyncio.Event()
    with signals(stopped):
        async with Bus.connect(settings, name="train") as bus:
            await join(bus, config)
            watch = Watch(progress=Progress(), processes=[], parting="Ctrl-C detaches; the run goes on")
            reason, detail = await until_over(bus, config, watch, remarking(run, look), stopped)
            if reason is StopReason.INTERRUPTED and stopped.is_set():
                raise Detached(run, settings.url)
            if (await state_of(bus, run)).phase != "stopped":
                await stop_run(bus, run, reason, detail)
            summary, _ = await numbers_now(bus, config)
            return Outcome(reason=reason, detail=detail, progress=watch.progress, summary=summary)


def remarking(run: str, look: Callable[[Watch], None]) -> Callable[[Watch], None]:
    def remark(watch: Watch) -> None:
        watch.remark = remark_on(watch.progress, run, time.time()) if watch.caught_up else ""
        look(watch)

    return remark


def remark_on(progress: Progress, run: str, now: float) -> str:
    """What a person should know who waits for a run that nobody has taken up."""
    waited_s = now - progress.last_movement_at
    if progress.last_movement != SUBMITTED or waited_s < UNTOUCHED_S:
        return ""
    return (
        f"nobody has taken it up since it was submitted: are the services of that deployment up, "
        f"and for this run (OPENFORGE_RUN={run})?"
    )
