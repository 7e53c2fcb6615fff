"""Joining a run: what was told before is old, and says nothing of whether the run moves now."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any, cast

from learner_world import run_config
from pretend_run import PretendRun

from openforge.bus import CAUGHT_UP, Bus, Told
from openforge.cli.follow import Watch, until_over
from openforge.cli.remote import remarking
from openforge.protos import Fact, StopReason
from openforge.runs import Progress, RunConfig

LONG_AGO = 1_600_000_000.0


class SlowHistory:
    """A bus whose history takes longer than the watcher's look at the clock."""

    def __init__(self, facts: Iterable[tuple[float, Fact]]) -> None:
        self._told = [
            Told(fact=fact, kind="", subject="", sequence=n, at=LONG_AGO + at) for n, (at, fact) in enumerate(facts, 1)
        ]

    async def follow(self, *_: Any, **__: Any) -> AsyncIterator[object]:
        yield self._told[0]
        await asyncio.sleep(1.2)
        for told in self._told[1:]:
            yield told
        yield CAUGHT_UP
        await asyncio.Event().wait()


async def joined(config: RunConfig, facts: Iterable[tuple[float, Fact]]) -> tuple[StopReason, list[str]]:
    """Why it was over, and what was remarked until then."""
    remarks: list[str] = []
    watch = Watch(progress=Progress(), processes=[])
    look = remarking(config.run.name, lambda watch: remarks.append(watch.remark))
    bus = cast(Bus, SlowHistory(facts))
    async with asyncio.timeout(20):
        reason, _ = await until_over(bus, config, watch, look, asyncio.Event())
    return reason, remarks


async def test_old_history_ends_no_run_and_is_not_remarked_on(tmp_path: Path) -> None:
    config = run_config(tmp_path, "r")
    reason, remarks = await joined(config, PretendRun(config).run().facts)
    assert reason is StopReason.COMPLETED
    assert set(remarks) == {""}


async def test_what_stands_still_when_all_is_folded_is_stuck(tmp_path: Path) -> None:
    config = run_config(tmp_path, "r")
    reason, remarks = await joined(config, PretendRun(config).run(until_s=0).facts[:1])
    assert reason is StopReason.NO_PROGRESS
    assert "nobody has taken it up" in remarks[-1]
