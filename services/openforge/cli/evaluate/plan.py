"""What an evaluation runs: one run of no steps for each harness, all over the same drawn tasks.

Promises: the runs differ in nothing but name, harness and its options, so a task's trials are those of the same
instance everywhere; an engine of our own repeats each answer to the bit, whatever else it computes; a weight version is
a folder that is there, or a sentence that names those that are.
"""

from pathlib import Path

import msgspec

from openforge.cli.home import Home
from openforge.env.check import is_fixed
from openforge.env.registry import load_environment, select
from openforge.runs import RunConfig
from openforge.weights import BadWeights
from openforge.weights.adapters import whole_folder


class NoSuchVersion(LookupError):
    """The run holds no weights of that version."""


def runs_of(config: RunConfig, name: str) -> dict[str, RunConfig]:
    """Harness -> the run that evaluates it."""
    harnesses = config.evaluation.harnesses or (config.environment.harness,)
    return {harness: _run_of(config, name, harness) for harness in harnesses}


def _run_of(config: RunConfig, name: str, harness: str) -> RunConfig:
    replace = msgspec.structs.replace
    options = config.evaluation.harness_options.get(harness, config.environment.options)
    return replace(
        config,
        run=replace(config.run, name=f"{name}-{harness}", steps=0),
        engine=replace(config.engine, batch_invariant=config.engine.kind == "embedded"),
        environment=replace(config.environment, harness=harness, options=options),
        evaluation=replace(config.evaluation, before=False, after=True, harnesses=(), harness_options={}, k=()),
    )


def model_of(config: RunConfig) -> str:
    """What the table calls that which is evaluated."""
    engine = config.engine
    return f"{engine.model} at {engine.url}" if engine.kind == "endpoint" else config.model.path


def overrides_for(url: str, model: str, key_env: str) -> list[str]:
    """The run file's fields that `--endpoint` and what belongs to it stand for."""
    if not url:
        return []
    named = {"engine.kind": "endpoint", "engine.url": url, "engine.model": model, "engine.key_env": key_env}
    return [f"{field}={msgspec.json.encode(value).decode()}" for field, value in named.items()] + ["run.steps=0"]


def ks_of(config: RunConfig) -> tuple[int, ...]:
    evaluation = config.evaluation
    return evaluation.k or tuple(dict.fromkeys((1, evaluation.trials)))


def problems_of_evaluating(config: RunConfig) -> list[str]:
    wanted = config.evaluation.heldout_episodes
    if wanted == 0:
        return ["evaluation.heldout_episodes = 0: write how many held-out tasks to draw"]
    tasks = select(load_environment(config.environment.name), config.environment.tasks)
    if all(is_fixed(task) for task in tasks) and wanted > len(tasks):
        return [
            f"evaluation.heldout_episodes = {wanted}: there are {len(tasks)} fixed tasks, and one that is drawn twice "
            f"would count as two: write {len(tasks)} or less"
        ]
    return []


def weights_of(run: str, version: int) -> Path:
    """A folder with the whole weights of a published version of a run on this machine; raises `NoSuchVersion`."""
    folder = Home(run).root / "weights"
    found = sorted(folder.glob(f"v{version:06d}-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    if found:
        try:
            return whole_folder(found[-1], Home(run).root / "merged")
        except BadWeights as error:
            raise NoSuchVersion(f"version {version} of run {run!r} cannot be read: {error}") from error
    there = sorted({int(path.name[1:].partition("-")[0]) for path in folder.glob("v*-*")})
    known = ", ".join(map(str, there)) or "none"
    raise NoSuchVersion(f"version {version} of run {run!r} is not in {folder}: there are {known}")
