"""Carries facts to the cores and their decisions to the bus.

Promises: nothing is decided before everything that was told is known; a decision that another
scheduler took first is adopted, so two of them do no harm; a restart begins at the last snapshot.
"""

import asyncio
import time
from typing import NoReturn

import msgspec

from openforge.bus import CAUGHT_UP, AlreadyTold, Bus, Cursors, Snapshot
from openforge.env.registry import load_environment, select
from openforge.protos import EpisodeRequested, Fact, GroupClosed, GroupOpened
from openforge.runs.config import RunConfig
from openforge.scheduler.core import Catalogue, Core, Decision
from openforge.scheduler.settings import Settings
from openforge.scheduler.state import Known
from openforge.service import cancel, health, log

FOLLOWED = ("run", "group", "episode", "trajectory", "policy")
WATCH_S = 30.0


async def serve(settings: Settings, bus: Bus, stop: asyncio.Event) -> None:
    scheduler = Scheduler(settings, bus)
    await scheduler.recall()
    async with asyncio.TaskGroup() as group:
        tasks = group.create_task(scheduler.follow()), group.create_task(scheduler.act())
        await stop.wait()
        await cancel(*tasks, again_s=0.5)
    await scheduler.remember()


class Scheduler:
    """All runs of this process: one core each."""

    def __init__(self, settings: Settings, bus: Bus) -> None:
        self._settings = settings
        self._bus = bus
        self._cores: dict[str, Core] = {}
        self._cursors = Cursors()
        self._caught_up = False
        self._changed = asyncio.Event()
        self._folded = 0
        self._watched_at = time.time()

    @property
    def _snapshot_name(self) -> str:
        return f"scheduler.{'all' if self._settings.run == '*' else self._settings.run}"

    async def recall(self) -> None:
        snapshot = await self._bus.recall(self._snapshot_name)
        if snapshot is None:
            return
        try:
            known = msgspec.msgpack.decode(snapshot.state, type=dict[str, Known])
        except msgspec.DecodeError as error:
            log.warning("snapshot of another release put aside", why=str(error))
            return
        self._cores = {run: self._core(run, state) for run, state in known.items()}
        self._cursors = snapshot.cursors

    async def remember(self) -> None:
        """State and cursors of one moment, before anything else is awaited."""
        if not self._folded:
            return
        state = msgspec.msgpack.encode({run: core.known for run, core in self._cores.items()})
        self._folded = 0
        await self._bus.remember(self._snapshot_name, Snapshot(state=state, cursors=self._cursors))

    def _core(self, run: str, known: Known | None = None) -> Core:
        return Core(run, known, engines=self._settings.engines)

    async def follow(self) -> NoReturn:
        """Fold facts as they come."""
        async for told in self._bus.follow(FOLLOWED, run=self._settings.run, cursors=self._cursors):
            if told is CAUGHT_UP:
                self._caught_up = True
                log.info("caught up", runs=len(self._cores), facts=self._folded)
            else:
                if told.fact.run not in self._cores:
                    self._cores[told.fact.run] = self._core(told.fact.run)
                self._cores[told.fact.run].apply(told.fact, told.at)
                self._cursors = self._cursors.after(told)
                self._folded += 1
            self._changed.set()
        raise RuntimeError("the bus stopped telling facts")

    async def act(self) -> NoReturn:
        """Decide whenever something changed or a retry is due."""
        while True:
            await self._wait()
            if not self._caught_up:
                continue
            for core in list(self._cores.values()):
                await self._pace(core)
            if self._folded >= self._settings.scheduler_snapshot_every:
                await self.remember()
            self._watch()

    async def _wait(self) -> None:
        """Until a fact comes or a retry is due; while catching up, only facts count."""
        due = min((at for core in self._cores.values() if (at := core.next_due()) is not None), default=None)
        wait_s = WATCH_S if due is None or not self._caught_up else max(0.0, min(WATCH_S, due - time.time()))
        try:
            async with asyncio.timeout(wait_s):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()

    async def _pace(self, core: Core) -> None:
        if core.catalogue is None and core.config is not None:
            core.equip(catalogue_of(core.config))
        while decisions := core.due(time.time()):
            await self._tell(core, decisions)
        health.report(
            **{
                core.run: {
                    "slots_open": core.slots_open(),
                    "slots_allowed": core.slots_allowed(),
                    "trained": core.known.trained,
                }
            }
        )

    async def _tell(self, core: Core, decisions: list[Decision]) -> None:
        """Tell them all; where one was taken otherwise before, one after the other, adopting what was told."""
        try:
            await self._bus.tell_all(decisions)
        except AlreadyTold:
            adopted: list[Fact] = [await self._tell_or_adopt(decision) for decision in decisions]
        else:
            adopted = [*decisions]
        for fact in adopted:
            core.apply(fact, time.time())
            _log_decision(fact)

    async def _tell_or_adopt(self, decision: Decision) -> Fact:
        try:
            await self._bus.tell(decision)
        except AlreadyTold as already:
            if already.same:
                return decision
            log.warning("another scheduler decided first", run=decision.run, subject=already.subject)
            if already.existing is None:
                raise
            return already.existing.fact
        return decision

    def _watch(self) -> None:
        """Name what takes too long, now and then."""
        now = time.time()
        if now - self._watched_at < WATCH_S:
            return
        self._watched_at = now
        for core in self._cores.values():
            if core.is_probing():
                log.warning("no group had a verdict lately: one at a time", run=core.run, groups=core.known.barren)
            for late in core.overdue(now):
                log.warning(
                    "overdue", run=core.run, episode=late.episode, attempt=late.attempt, age_s=round(late.age_s, 1)
                )


def catalogue_of(config: RunConfig) -> Catalogue:
    """What the run's environment offers it; raises what `openforge.env.registry` raises."""
    asked = config.environment
    module = load_environment(asked.name)
    return Catalogue(
        tasks=tuple(template.id for template in select(module, asked.tasks)),
        env_kind=module.HARNESSES[asked.harness],
    )


def _log_decision(fact: Fact) -> None:
    match fact:
        case GroupOpened():
            log.info(
                "group opened", run=fact.run, group=fact.group, task=fact.task.task, start_version=fact.start_version
            )
        case EpisodeRequested() if fact.attempt:
            log.info("episode tried again", run=fact.run, episode=fact.episode, attempt=fact.attempt)
        case GroupClosed():
            failed = [member.episode for member in fact.members if member.failed]
            log.info("group closed", run=fact.run, group=fact.group, members=len(fact.members), failed=failed)
        case _:
            pass
