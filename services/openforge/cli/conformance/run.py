"""Harnesses in one run: bus, services, sandbox, all as in any run, with the script before the engine.

Promises: when it returns nothing of the run is at work; a run that cannot be made says why in its line.
"""

import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from openforge.bus import CAUGHT_UP
from openforge.chat.chatml import load_tokenizer
from openforge.chat.renderers import load_renderer
from openforge.cli.conduct import Dress, as_it_is, conduct
from openforge.cli.conformance.line import Fault, Line
from openforge.cli.conformance.page import said
from openforge.cli.conformance.prompter import Prompter
from openforge.cli.conformance.row import Evidence, Row, gathered, row_of
from openforge.cli.conformance.script import Script
from openforge.cli.conformance.truth import Reading
from openforge.cli.follow import Watch
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

RENDERER = "chatml-hermes"
SCRIPTED_CONTEXT = 65536
HARNESS_CONTEXT = 60_000
"""What the harnesses are told: a little less, so that none compacts."""
REAL_CONTEXT, REAL_TOKENS, REAL_TURNS = 8192, 64, 3
_START_S = 900.0
_FILL_TOKENS = "2048"
_KINDS = ("episode", "turn", "trajectory")


class Host:
    """Runs harnesses with the weights in `weights`, which stay as they are."""

    def __init__(self, weights: Path, runs: Path, say: Callable[[str], None]) -> None:
        self._weights = weights
        self._runs = runs
        self._say = say
        self._tokenizer = load_tokenizer(weights)
        self._reading = Reading(load_renderer(RENDERER, str(weights)), self._tokenizer)

    async def scripted(self, tasks: Sequence[str], *, timeout_s: float) -> list[Row]:
        """A line for each task of the environment `conformance`, said as soon as it is known."""
        home = self._home("conformance")
        prompter = Prompter(Script(self._tokenizer))
        line = Line(home.sockets / "line" / "proxy.sock", home.sockets / "proxy.sock", lambda: _kill_proxy(home))
        config = self._config(home.run, _each(tasks, timeout_s), context=SCRIPTED_CONTEXT, max_tokens=2048)
        async with prompter.serving(), line.open():
            await self._conducted(config, home, _dressed(prompter, home))
        return [self._row(episode, line.struck[episode.requested.episode]) for episode in await _episodes(home)]

    async def real(self, tasks: Sequence[str], *, timeout_s: float) -> list[Row]:
        """The same with a model that says what it likes, and the small harness of the environment `shell`."""
        rows = []
        for name, environment in (("real", _each(tasks, timeout_s)), ("real-small", _small(timeout_s))):
            home = self._home(f"conformance-{name}")
            short = msgspec.structs.replace(
                environment, limits=msgspec.structs.replace(environment.limits, turns=REAL_TURNS)
            )
            config = self._config(home.run, short, context=REAL_CONTEXT, max_tokens=REAL_TOKENS)
            await self._conducted(config, home)
            rows += [self._row(episode, Counter()) for episode in await _episodes(home)]
        return rows

    def _home(self, run: str) -> Home:
        """An empty one: what an earlier run left is removed."""
        home = Home(run, self._runs)
        shutil.rmtree(home.root, ignore_errors=True)
        return home

    def _row(self, episode: Evidence, struck: Counter[Fault]) -> Row:
        row = row_of(episode, self._reading, self._weights, struck)
        self._say(said(row))
        return row

    async def _conducted(self, config: RunConfig, home: Home, dress: Dress = as_it_is) -> None:
        """The run from its first fact to its last."""
        self._say(f"run {home.run}: {len(config.environment.tasks)} jobs, logs in {home.logs}")
        with home.held():
            await conduct(config, home, _Progress(len(config.environment.tasks), self._say).look, dress)

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


def _kill_proxy(home: Home) -> None:
    processes = msgspec.json.decode((home.root / "processes.json").read_bytes())
    os.kill(processes["proxy"]["pid"], signal.SIGKILL)
