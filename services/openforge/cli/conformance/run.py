"""Harnesses in one run: bus, services, sandbox, all as in any run, with the script before the engine.

Promises: when it returns nothing of the run is at work; a run that cannot be made says why in its line.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from openforge.bus import CAUGHT_UP
from openforge.chat.chatml import load_tokenizer
from openforge.chat.renderers import load_renderer
from openforge.cli.conduct import conduct
from openforge.cli.conformance.line import Line
from openforge.cli.conformance.prompter import Prompter
from openforge.cli.conformance.row import Row, gathered, row_of
from openforge.cli.conformance.script import Script
from openforge.cli.conformance.truth import Reading
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
)

RUN = "conformance"
IN_FLIGHT = 2
RENDERER = "chatml-hermes"
HARNESS_CONTEXT = 60_000
_FILL_TOKENS = "2048"
_KINDS = ("episode", "turn", "trajectory")


class Host:
    """Runs harnesses with the weights in `weights`, which stay as they are."""

    def __init__(self, weights: Path, runs: Path, *, timeout_s: float) -> None:
        self._weights = weights
        self._runs = runs
        self._timeout_s = timeout_s
        self._tokenizer = load_tokenizer(weights)
        self._reading = Reading(load_renderer(RENDERER, str(weights)), self._tokenizer)

    async def run(self, tasks: Sequence[str], told: Callable[[Row], None]) -> list[Row]:
        """A line for each task, told as soon as it is known."""
        home = Home(RUN, self._runs)
        shutil.rmtree(home.root, ignore_errors=True)
        config = self._config(tasks)
        prompter = Prompter(Script(self._tokenizer))
        line = Line(home.sockets / "line" / "proxy.sock", home.sockets / "proxy.sock")
        with home.held():
            async with prompter.serving(), line.open():
                await conduct(config, home, lambda _: None, _dressed(prompter, home))
        rows = []
        for episode in gathered(await _facts(RUN)):
            struck = line.struck[episode.requested.episode]
            rows.append(row_of(episode, self._reading, self._weights, struck))
            told(rows[-1])
        return rows

    def _config(self, tasks: Sequence[str]) -> RunConfig:
        harnesses = [find(task.rpartition("_")[0]) for task in tasks]
        return RunConfig(
            run=RunSection(name=RUN, steps=0, seed=1, no_progress_s=self._timeout_s + 900),
            model=ModelSection(path=str(self._weights), renderer=RENDERER, context=65536),
            engine=EngineSection(dtype="float32", threads=os.cpu_count() or 1, max_requests=16),
            sampling=SamplingSection(max_tokens=2048),
            environment=EnvironmentSection(
                name="conformance",
                harness="each",
                tasks=tuple(tasks),
                options={"context": HARNESS_CONTEXT},
                limits=LimitsSection(
                    turns=60,
                    timeout_s=self._timeout_s,
                    memory_mb=max(harness.memory_mb for harness in harnesses),
                    pids=1024,
                    disk_mb=max(harness.disk_mb for harness in harnesses),
                    cpus=float(os.cpu_count() or 1),
                ),
            ),
            pacing=PacingSection(in_flight=IN_FLIGHT, attempts=1),
            evaluation=EvaluationSection(heldout_episodes=len(tasks), before=True, after=False),
        )


def _dressed(prompter: Prompter, home: Home) -> Callable[[Spec, Ports], Spec]:
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


async def _facts(run: str) -> list[Fact]:
    async with bus_of(run) as bus:
        return [told.fact async for told in bus.follow(_KINDS, run=run, until_now=True) if told is not CAUGHT_UP]
