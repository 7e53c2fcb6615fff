"""Harnesses in one run: bus, services, sandbox, all as in any run, with the script before the engine.

Promises: when it returns nothing of the run is at work; a run that cannot be made says why in its line; a signal ends
it, whatever it is doing, and the lines that were shown stand.
"""

import asyncio
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from openforge.bus import CAUGHT_UP
from openforge.chat.chatml import load_tokenizer
from openforge.chat.renderers import load_renderer
from openforge.cli.conduct import Dress, as_it_is, conduct
from openforge.cli.conformance.apart import Interrupted, unless_stopped
from openforge.cli.conformance.line import Fault, Line
from openforge.cli.conformance.prompter import Prompter
from openforge.cli.conformance.row import Evidence, Row, gathered, row_of
from openforge.cli.conformance.script import Script
from openforge.cli.conformance.truth import Reading
from openforge.cli.follow import Watch, signals
from openforge.cli.home import Home
from openforge.cli.local import Ports
from openforge.cli.reach import bus_of
from openforge.cli.supervise import Spec
from openforge.harnesses import find
from openforge.protos import Fact
from openforge.runs import RunConfig
from openforge.runs.config import (
    EngineSection,
    EnvironmentSection,
    EvaluationSection,
    LimitsSection,
    ModelSection,
    PacingSection,
    RunSection,
    SamplingSection,
    TrainingSection,
)

SCRIPTED = "conformance"
RENDERER = "chatml-hermes"
SCRIPTED_CONTEXT = 65536
HARNESS_CONTEXT = 60_000
"""What the harnesses are told: a little less, so that none compacts."""
REAL_CONTEXT, REAL_TOKENS, REAL_TURNS = 8192, 64, 3
_START_S = 900.0
_FILL_TOKENS = "2048"
_KINDS = ("episode", "turn", "trajectory")


class Host:
    """Runs harnesses with the weights in `weights`, which stay as they are. A line goes to `show` as soon as it is
    known; what else is to be said goes to `say`. Its methods raise `Interrupted` on Ctrl-C and SIGTERM."""

    def __init__(self, weights: Path, runs: Path, say: Callable[[str], None], show: Callable[[Row], None]) -> None:
        self._weights = weights
        self._runs = runs
        self._say = say
        self._show = show
        self._stopped = asyncio.Event()
        self._tokenizer = load_tokenizer(weights)
        self._reading = Reading(load_renderer(RENDERER, str(weights)), self._tokenizer)

    async def scripted(self, tasks: Sequence[str], *, timeout_s: float) -> None:
        """A line for each task of the environment `conformance`."""
        home = self._emptied(SCRIPTED)
        prompter = Prompter(Script(self._tokenizer))
        line = Line(home.sockets / "line" / "proxy.sock", home.sockets / "proxy.sock", lambda: _kill_proxy(home))
        config = self._config(home.run, _each(tasks, timeout_s), context=SCRIPTED_CONTEXT, max_tokens=2048)
        with signals(self._stopped):
            async with prompter.serving(), line.open():
                try:
                    await self._conducted(config, home, _dressed(prompter, home))
                finally:
                    _struck(home).write_bytes(msgspec.json.encode(line.struck))
            await self._judged(home)

    async def again(self, tasks: Sequence[str]) -> None:
        """A line for each of these tasks that `scripted` hosted last, however that ended. Nothing is hosted."""
        with signals(self._stopped):
            await self._judged(Home(SCRIPTED, self._runs), tasks)

    async def real(self, tasks: Sequence[str], *, timeout_s: float) -> None:
        """The same with a model that says what it likes, and the small harness of the environment `shell`."""
        with signals(self._stopped):
            for name, environment in (("real", _each(tasks, timeout_s)), ("real-small", _small(timeout_s))):
                home = self._emptied(f"conformance-{name}")
                short = msgspec.structs.replace(
                    environment, limits=msgspec.structs.replace(environment.limits, turns=REAL_TURNS)
                )
                config = self._config(home.run, short, context=REAL_CONTEXT, max_tokens=REAL_TOKENS)
                await self._conducted(config, home)
                await self._judged(home)

    async def _judged(self, home: Home, tasks: Sequence[str] = ()) -> None:
        """What the run that rests in `home` was, line by line: each of its tasks, or `tasks` alone."""
        struck: dict[str, dict[Fault, int]] = {}
        if _struck(home).exists():
            struck = msgspec.json.decode(_struck(home).read_bytes(), type=dict[str, dict[Fault, int]])
        episodes = await _episodes(home)
        if self._stopped.is_set():
            raise Interrupted
        for episode in episodes:
            if tasks and episode.requested.task.task not in tasks:
                continue
            faults = Counter(struck.get(episode.requested.episode, {}))
            judge = partial(row_of, episode, self._reading, self._weights, faults)
            self._show(await unless_stopped(judge, self._stopped))

    def _emptied(self, run: str) -> Home:
        """What an earlier run left is removed."""
        home = Home(run, self._runs)
        shutil.rmtree(home.root, ignore_errors=True)
        return home

    async def _conducted(self, config: RunConfig, home: Home, dress: Dress = as_it_is) -> None:
        """The run from its first fact to its last."""
        self._say(f"run {home.run}: {len(config.environment.tasks)} jobs, logs in {home.logs}")
        with home.held():
            progress = _Progress(len(config.environment.tasks), self._say)
            await conduct(config, home, progress.look, dress, stopped=self._stopped)
        if self._stopped.is_set():
            raise Interrupted

    def _config(self, run: str, environment: EnvironmentSection, *, context: int, max_tokens: int) -> RunConfig:
        """Scripted words are not drawn under a guide: their log-probs are the policy's own whatever is asked."""
        silence_s = environment.limits.timeout_s + _START_S
        return RunConfig(
            run=RunSection(name=run, steps=0, seed=1, no_progress_s=silence_s),
            model=ModelSection(path=str(self._weights), renderer=RENDERER, context=context),
            engine=EngineSection(dtype="float32", threads=os.cpu_count() or 1, max_requests=16),
            sampling=SamplingSection(max_tokens=max_tokens),
            environment=environment,
            training=TrainingSection(guided="train"),
            pacing=PacingSection(in_flight=1, attempts=1),
            evaluation=EvaluationSection(heldout_episodes=len(environment.tasks), before=True, after=False),
        )


def _each(tasks: Sequence[str], timeout_s: float) -> EnvironmentSection:
    """Room enough for the largest harness."""
    harnesses = [find(task.rpartition("_")[0]) for task in tasks]
    return EnvironmentSection(
        name="conformance",
        harness="each",
        tasks=tuple(tasks),
        options={"context": HARNESS_CONTEXT},
        limits=LimitsSection(
            turns=60,
            timeout_s=timeout_s,
            memory_mb=max(harness.memory_mb for harness in harnesses),
            pids=1024,
            disk_mb=max(harness.disk_mb for harness in harnesses),
            cpus=float(os.cpu_count() or 1),
        ),
    )


def _small(timeout_s: float) -> EnvironmentSection:
    return EnvironmentSection(
        name="shell",
        harness="openai-script",
        tasks=("write_word",),
        options={"turns": REAL_TURNS},
        limits=LimitsSection(timeout_s=timeout_s),
    )


class _Progress:
    """Says when the services are up and when a job has ended."""

    def __init__(self, jobs: int, say: Callable[[str], None]) -> None:
        self._jobs = jobs
        self._say = say
        self._ended = -1

    def look(self, watch: Watch) -> None:
        progress = watch.progress
        if progress.served is None:
            return
        ended = progress.episodes_verified + progress.failed_attempts.total()
        if ended > self._ended:
            self._ended = ended
            self._say(f"  {ended} of {self._jobs} jobs have ended" if ended else "  the services are up")


async def _episodes(home: Home) -> list[Evidence]:
    async with bus_of(home.run) as bus:
        facts: list[Fact] = [
            told.fact async for told in bus.follow(_KINDS, run=home.run, until_now=True) if told is not CAUGHT_UP
        ]
    return gathered(facts)


def _dressed(prompter: Prompter, home: Home) -> Dress:
    """The services of a normal run, but for two addresses."""

    def dress(spec: Spec, ports: Ports) -> Spec:
        env = dict(spec.env)
        match spec.name:
            case "proxy":
                prompter.engine_url = f"http://127.0.0.1:{ports.engine}"
                env["OPENFORGE_ENGINE_URL"] = prompter.url
            case "sandbox_manager":
                env["OPENFORGE_SOCKETS"] = str(home.sockets / "line")
            case "engine":
                env["OPENFORGE_ENGINE_FILL_TOKENS"] = _FILL_TOKENS
        return msgspec.structs.replace(spec, env=env)

    return dress


def _struck(home: Home) -> Path:
    """Which faults struck which episode: the line alone knows."""
    return home.root / "struck.json"


def _kill_proxy(home: Home) -> None:
    processes = msgspec.json.decode((home.root / "processes.json").read_bytes())
    os.kill(processes["proxy"]["pid"], signal.SIGKILL)
