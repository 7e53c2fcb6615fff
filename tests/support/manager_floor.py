"""A floor on which a sandbox manager works for the run `odd`: asks for attempts, waits for their ends."""

import asyncio
import os
from pathlib import Path

import msgspec
from process_watch import running
from turn_taker import TurnTaker

from openforge.bus import Bus
from openforge.protos import EpisodeEnded, EpisodeLimits, EpisodeRequested, TaskRef
from openforge.runs import RunConfig
from openforge.runs.config import EnvironmentSection, ModelSection, RunSection
from openforge.sandbox_manager.settings import Settings

RUN = "odd"
ENVIRONMENT = Path(__file__).parent / "odd_env"
LIMITS = EpisodeLimits(timeout_s=20.0, turns=3, tokens_per_turn=16, memory_mb=192, pids=64, disk_mb=16)


def odd_config() -> RunConfig:
    return RunConfig(
        run=RunSection(name=RUN, steps=1),
        model=ModelSection(path="/none"),
        environment=EnvironmentSection(name=str(ENVIRONMENT), harness="good"),
    )


class Floor:
    """What tests do with a manager: ask for an attempt, wait for its end."""

    def __init__(self, bus: Bus, settings: Settings, turns: TurnTaker) -> None:
        self.bus = bus
        self.settings = settings
        self.turns = turns
        self._seed = (1000 + os.getpid()) * 1000  # no other test's on this machine
        self._count = 0

    async def request(
        self, harness: str, kind: str, *, episode: str = "", timeout_s: float = 20.0, task: str = "start"
    ) -> str:
        self._count += 1
        episode = episode or f"e{self._count}"
        limits = msgspec.structs.replace(LIMITS, timeout_s=timeout_s)
        await self.bus.tell(
            EpisodeRequested(
                run=RUN,
                episode=episode,
                attempt=0,
                group="g",
                purpose="train",
                task=TaskRef(env=str(ENVIRONMENT), task=task, seed=self._seed + self._count),
                harness=harness,
                env_kind=kind,  # type: ignore[arg-type]
                limits=limits,
                seed=0,
            )
        )
        return episode

    def sleepers(self) -> int:
        """How many processes of this process's floors sleep: harnesses that never end, and services."""
        return running(f"sleep\0{self._seed // 1000}")

    async def end_of(self, episode: str, within_s: float = 60.0) -> EpisodeEnded:
        async with asyncio.timeout(within_s):
            while (told := await self.bus.find(EpisodeEnded, RUN, episode, 0)) is None:
                await asyncio.sleep(0.05)
            return told.fact

    async def attempt(self, harness: str, kind: str, *, timeout_s: float = 20.0, task: str = "start") -> EpisodeEnded:
        return await self.end_of(await self.request(harness, kind, timeout_s=timeout_s, task=task))
