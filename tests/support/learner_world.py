"""A learner process on a real bus, fed with made-up verdicts; the feeder follows what is trained."""

import asyncio
import os
import random
import signal
import sys
from collections.abc import Callable
from collections.abc import Sequence as Arguments
from pathlib import Path
from typing import Any

import msgspec

from openforge.bus import Bus, BusSettings
from openforge.cli.soak import children_of
from openforge.learner.service import serve
from openforge.learner.settings import Settings
from openforge.models import tiny
from openforge.protos import (
    BatchTrained,
    EndReason,
    GroupClosed,
    GroupOpened,
    Member,
    PolicyPublished,
    Sequence,
    Span,
    TaskRef,
    TrajectoryRetired,
    TrajectoryVerified,
    VersionSpan,
    pack_ids,
    pack_logprobs,
)
from openforge.runs import RunConfig, config_of
from openforge.weights import WEIGHTS, read_manifest

VOCABULARY = 259
ROOT = Path(__file__).resolve().parents[2]
_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def inherited() -> dict[str, str]:
    """The environment without what a backend in this process said of its own rank."""
    return {name: value for name, value in os.environ.items() if name not in _OF_TORCHRUN}


def run_config(model: Path, name: str = "lineage", **sections: dict[str, Any]) -> RunConfig:
    said: dict[str, Any] = {
        "run": {"name": name, "steps": 6},
        "model": {"path": str(model)},
        "engine": {"dtype": "float32"},
        "environment": {"name": "letters", "harness": "direct"},
        "pacing": {"groups_per_step": 2, "group_size": 4, "max_lag": 1},
        "learner": {"learning_rate": 1e-3, "row_tokens": 128, "checkpoint_every": 2},
    }
    for section, values in sections.items():
        said[section] = {**said.get(section, {}), **values}
    return config_of(msgspec.json.encode(said).decode())


def tiny_model(folder: Path) -> Path:
    return tiny(folder / "model", hidden=32, layers=1, heads=2, kv_heads=1)


def group_name(ordinal: int) -> str:
    return f"g{ordinal:06d}"


def verdict(
    config: RunConfig,
    ordinal: int,
    member: int,
    version: int,
    *,
    reward: float | None = None,
    logprob: float | None = None,
) -> TrajectoryVerified:
    """The same arguments give the same trajectory."""
    rng = random.Random(f"{ordinal}-{member}")
    prompt = [1, *(random.Random(ordinal).randrange(3, VOCABULARY) for _ in range(12))]
    answer = [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(3, 8))]
    logprobs = [logprob if logprob is not None else -rng.uniform(1.0, 6.0) for _ in answer]
    return TrajectoryVerified(
        run=config.run.name,
        episode=f"{group_name(ordinal)}-{member}",
        attempt=0,
        group=group_name(ordinal),
        purpose="train",
        task=TaskRef(env="letters", task="t", seed=ordinal),
        harness="direct",
        sequences=(
            Sequence(
                ids=pack_ids([*prompt, *answer]),
                loss=(Span(len(prompt), len(answer)),),
                logprobs=pack_logprobs(logprobs),
                versions=(VersionSpan(len(prompt), len(answer), version),),
                turns=(0,),
            ),
        ),
        temperature=1.0,
        reward=float(rng.random() < 0.5) if reward is None else reward,
        ended=EndReason.FINISHED,
        sampled_tokens=len(answer),
        prompt_tokens=len(prompt),
        turns=1,
    )


async def open_group(bus: Bus, config: RunConfig, ordinal: int, version: int) -> None:
    await bus.tell_all(
        [
            GroupOpened(
                run=config.run.name,
                group=group_name(ordinal),
                ordinal=ordinal,
                purpose="train",
                task=TaskRef(env="letters", task="t", seed=ordinal),
                size=config.pacing.group_size,
                start_version=version,
            )
        ]
    )


async def close_group(bus: Bus, config: RunConfig, ordinal: int) -> None:
    members = tuple(
        Member(episode=f"{group_name(ordinal)}-{member}", attempt=0) for member in range(config.pacing.group_size)
    )
    await bus.tell_all([GroupClosed(run=config.run.name, group=group_name(ordinal), members=members)])


async def feed_group(bus: Bus, config: RunConfig, ordinal: int, version: int, **more: float) -> None:
    """One whole group, sampled by `version`."""
    await open_group(bus, config, ordinal, version)
    await bus.tell_all(
        [verdict(config, ordinal, member, version, **more) for member in range(config.pacing.group_size)]
    )
    await close_group(bus, config, ordinal)


async def feed_run(bus: Bus, config: RunConfig) -> None:
    """What a run's scheduler and verifier would tell, one version ahead of what is trained, until its last step."""
    per_step = config.pacing.groups_per_step
    for step in range(config.run.steps):
        version = max(0, step - config.pacing.max_lag)
        await until(lambda version=version: is_published(bus, config.run.name, version))
        for ordinal in range(step * per_step, (step + 1) * per_step):
            await feed_group(bus, config, ordinal, version)


async def is_published(bus: Bus, run: str, version: int) -> bool:
    return bool(await bus.count(PolicyPublished, run, version))


async def is_trained(bus: Bus, run: str, version: int) -> bool:
    return await bus.find(BatchTrained, run, version) is not None


async def retired(bus: Bus, run: str) -> list[TrajectoryRetired]:
    return [told.fact for told in await bus.read(TrajectoryRetired, run)]


async def lineage(bus: Bus, run: str) -> list[BatchTrained]:
    return [told.fact for told in await bus.read(BatchTrained, run)]


async def newest_published(bus: Bus, run: str) -> PolicyPublished:
    return max((told.fact for told in await bus.read(PolicyPublished, run)), key=lambda f: (f.version, f.incarnation))


def weights_hash(published: PolicyPublished) -> str:
    return read_manifest(published.location).files[WEIGHTS].blake3


async def until(condition: Callable[[], Any], timeout_s: float = 600.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.05)


class LearnerProcess:
    """`python -m openforge.learner`, with its log in `<home>/learner.log`."""

    def __init__(self, bus_settings: BusSettings, home: Path, run: str, launcher: Arguments[str] = ()) -> None:
        self._url = bus_settings.url
        self.home = home
        self._run = run
        self._launcher = launcher
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> "LearnerProcess":
        self.home.mkdir(parents=True, exist_ok=True)
        paths = [str(ROOT / part) for part in ("protos", "libs", "services", "envs")]
        env = {
            **inherited(),
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "OPENFORGE_NATS_URL": self._url,
            "OPENFORGE_RUN": self._run,
            "OPENFORGE_HOME": str(self.home),
            "OPENFORGE_DIE_WITH_PARENT": "1",
        }
        with (self.home / "learner.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, *self._launcher, "-m", "openforge.learner"), env=env, stderr=log, stdout=log
            )
        return self

    async def wait(self, timeout_s: float = 600.0) -> int:
        assert self._process is not None
        async with asyncio.timeout(timeout_s):
            return await self._process.wait()

    async def kill(self) -> None:
        await self._end(signal.SIGKILL)

    async def stop(self) -> int:
        return await self._end(signal.SIGTERM)

    async def kill_follower(self) -> int:
        """SIGKILL the rank beside rank 0, as soon as there is one; how rank 0 then ends."""
        async with asyncio.timeout(300):
            while not (followers := self.followers()):
                await asyncio.sleep(0.02)
        os.kill(followers[0], signal.SIGKILL)
        return await self.wait()

    def followers(self) -> list[int]:
        """The other ranks: processes that rank 0 started."""
        assert self._process is not None
        return children_of(self._process.pid)

    async def _end(self, number: signal.Signals) -> int:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.send_signal(number)
        return await self.wait()

    def expect_alive(self) -> None:
        assert self._process is not None
        assert self._process.returncode is None, self.log()[-2000:]

    def log(self) -> str:
        return (self.home / "learner.log").read_text()


class LearnerHere:
    """The same service within the test's own process: no start of an interpreter, no kill."""

    def __init__(self, bus_settings: BusSettings, home: Path, run: str) -> None:
        self._bus_settings = bus_settings
        self._settings = Settings(run=run, home=home)
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> "LearnerHere":
        self._stop.clear()
        self._task = asyncio.create_task(self._live())
        return self

    async def _live(self) -> None:
        async with Bus.connect(self._bus_settings, name="learner") as bus:
            await serve(self._settings, bus, self._stop)

    async def stop(self) -> None:
        """Cleanly; raises what ended it before."""
        assert self._task is not None
        self._stop.set()
        await self._task
