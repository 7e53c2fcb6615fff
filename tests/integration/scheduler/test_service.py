"""The scheduler as a service on a real server, with agents and a learner that are pretended over the bus."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from openforge.bus import CAUGHT_UP, Bus, Told
from openforge.bus.server import NatsServer
from openforge.protos import (
    BatchTrained,
    EndReason,
    EpisodeFailed,
    EpisodeRequested,
    Fact,
    FailReason,
    GroupClosed,
    GroupOpened,
    PolicyServed,
    RunStopped,
    StopReason,
    TrajectoryVerified,
)
from openforge.runs import RunConfig, submit
from openforge.scheduler.service import serve
from openforge.scheduler.settings import Settings

ENVIRONMENT = """
HARNESSES = {"words": "direct"}

class Template:
    def __init__(self, id):
        self.id = id

def tasks():
    return [Template("touch"), Template("rename")]

def create_direct(sandbox, *, harness, **options):
    raise NotImplementedError
"""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "env.py").write_text(ENVIRONMENT)
    return msgspec.convert(
        {
            "run": {"name": "r", "steps": 3},
            "model": {"path": "/m"},
            "environment": {"name": str(tmp_path / "tasks" / "env.py"), "harness": "words"},
            "pacing": {"groups_per_step": 2, "group_size": 2, "in_flight": 8, "max_lag": 1},
            "evaluation": {"heldout_episodes": 4},
        },
        RunConfig,
    )


class Others:
    """Everybody but the scheduler. The first attempt of every third episode fails."""

    def __init__(self, bus: Bus, steps: int, groups_per_step: int) -> None:
        self._bus, self._steps, self._per_step = bus, steps, groups_per_step
        self._closed: list[GroupClosed] = []
        self.version = 0
        self.evaluated = asyncio.Event()
        self._evals = 0

    async def live(self) -> None:
        await self._serve(0)
        async for told in self._bus.follow(("group", "episode"), run="r"):
            if told is CAUGHT_UP:
                continue
            match told.fact:
                case EpisodeRequested():
                    await self._bus.tell(self._ended(told.fact))
                case GroupClosed():
                    await self._close(told.fact)

    def _ended(self, asked: EpisodeRequested) -> Fact:
        if asked.attempt == 0 and asked.seed % 3 == 0:
            return EpisodeFailed(run="r", episode=asked.episode, attempt=0, reason=FailReason.HOST_LOST)
        return TrajectoryVerified(
            run="r",
            episode=asked.episode,
            attempt=asked.attempt,
            group=asked.group,
            purpose=asked.purpose,
            task=asked.task,
            harness=asked.harness,
            sequences=(),
            temperature=1.0,
            reward=1.0,
            ended=EndReason.FINISHED,
        )

    async def _close(self, closed: GroupClosed) -> None:
        if closed.group.startswith("e"):
            self._evals += 1
            if self._evals == 8:
                self.evaluated.set()
            return
        self._closed.append(closed)
        if len(self._closed) < self._per_step or self.version >= self._steps:
            return
        batch, self._closed = self._closed[: self._per_step], self._closed[self._per_step :]
        self.version += 1
        await self._bus.tell(
            BatchTrained(
                run="r",
                version=self.version,
                base=self.version - 1,
                episodes=tuple(member.episode for group in batch for member in group.members),
                groups=tuple(group.group for group in batch),
                config_digest="d",
                lag=0,
            )
        )
        await self._serve(self.version)

    async def _serve(self, version: int) -> None:
        await self._bus.tell(
            PolicyServed(run="r", version=version, incarnation=0, engine="e", digest="d", probe_error=0.0)
        )


@contextlib.asynccontextmanager
async def running(bus: Bus, settings: Settings) -> AsyncIterator[asyncio.Task[None]]:
    stop = asyncio.Event()
    task = asyncio.create_task(serve(settings, bus, stop))
    try:
        yield task
    finally:
        stop.set()
        await task


@contextlib.asynccontextmanager
async def living(others: Others) -> AsyncIterator[None]:
    task = asyncio.create_task(others.live())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def all_of(bus: Bus, kind: type[Fact]) -> list[Told[Fact]]:
    return [*await bus.read(kind, "r")]


async def test_a_whole_run_is_paced_evaluated_before_and_after_and_closes(bus: Bus, config: RunConfig) -> None:
    others = Others(bus, steps=3, groups_per_step=2)
    await submit(bus, config)
    async with running(bus, Settings(run="r")), living(others):
        await asyncio.wait_for(others.evaluated.wait(), 60)
    opened = [told.fact for told in await all_of(bus, GroupOpened)]
    closed = [told.fact for told in await all_of(bus, GroupClosed)]
    assert [group.group for group in opened if isinstance(group, GroupOpened)] == [
        *(f"e000-00000{i}" for i in range(4)),
        *(f"g00000{i}" for i in range(6)),
        *(f"e003-00000{i}" for i in range(4)),
    ]
    assert len(closed) == len(opened)
    assert others.version == 3


async def test_a_scheduler_that_restarts_goes_on_from_its_snapshot(bus: Bus, config: RunConfig) -> None:
    others = Others(bus, steps=3, groups_per_step=2)
    settings = Settings(run="r", scheduler_snapshot_every=3)
    await submit(bus, config)
    async with living(others):
        for _ in range(4):
            async with running(bus, settings):
                await asyncio.sleep(0.3)
        assert await bus.recall("scheduler.r") is not None
        async with running(bus, settings):
            await asyncio.wait_for(others.evaluated.wait(), 60)
    assert await bus.count(GroupOpened, "r") == await bus.count(GroupClosed, "r") == 14


async def test_two_schedulers_do_no_harm(bus: Bus, config: RunConfig) -> None:
    others = Others(bus, steps=3, groups_per_step=2)
    await submit(bus, config)
    async with running(bus, Settings(run="r")), running(bus, Settings(run="*")), living(others):
        await asyncio.wait_for(others.evaluated.wait(), 60)
    assert await bus.count(GroupOpened, "r") == await bus.count(GroupClosed, "r") == 14


async def test_a_stopped_run_opens_nothing_until_it_is_submitted_again(bus: Bus, config: RunConfig) -> None:
    await submit(bus, config)
    await bus.tell(RunStopped(run="r", generation=0, reason=StopReason.INTERRUPTED))
    others = Others(bus, steps=3, groups_per_step=2)
    async with running(bus, Settings(run="r")), living(others):
        await asyncio.sleep(0.3)
        assert await bus.count(GroupOpened, "r") == 0
        await submit(bus, config)
        await asyncio.wait_for(others.evaluated.wait(), 60)


async def test_the_run_goes_on_over_a_restart_of_the_server(
    bus: Bus, nats_server: NatsServer, config: RunConfig
) -> None:
    others = Others(bus, steps=3, groups_per_step=2)
    await submit(bus, config)
    async with running(bus, Settings(run="r")), living(others):
        await asyncio.sleep(0.2)
        await nats_server.kill()
        await nats_server.start()
        await asyncio.wait_for(others.evaluated.wait(), 60)
    assert await bus.count(GroupOpened, "r") == await bus.count(GroupClosed, "r") == 14
