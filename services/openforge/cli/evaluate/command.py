"""`openforge eval RUN.toml`: every harness at the same held-out tasks, several trials each."""

import asyncio
import os
from typing import Annotated

import msgspec
import typer

from openforge.bus import Bus
from openforge.cli.conduct import Outcome, conduct
from openforge.cli.display import display
from openforge.cli.evaluate.plan import (
    NoSuchVersion,
    ks_of,
    model_of,
    overrides_for,
    problems_of_evaluating,
    runs_of,
    weights_of,
)
from openforge.cli.finish import write_summary_and_report
from openforge.cli.home import Home
from openforge.cli.reach import BAD_USE, fail
from openforge.cli.train import CANNOT_GO_ON, EXIT, Overrides, Plain, RunFile, check_endpoints, load, with_model
from openforge.protos import StopReason
from openforge.runs import BadRunFile, RunConfig, Summary, canonical
from openforge.runs.evaluation import evaluated
from openforge.runs.trials import Trial, trials_of


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """`trials.json` of one harness's run: what a complete run said, under its configuration's digest."""

    digest: str
    trials: list[Trial]
    failed_attempts: dict[str, int]


def evaluate(
    run_file: RunFile,
    overrides: Overrides = None,
    version: Annotated[
        str, typer.Option(help="RUN@VERSION: the weights of a published version of a run on this machine.")
    ] = "",
    endpoint: Annotated[
        str, typer.Option(help="Evaluate a model behind this OpenAI-compatible URL, ending in /v1 or the like.")
    ] = "",
    model: Annotated[str, typer.Option(help="The model's name there.")] = "",
    key_env: Annotated[str, typer.Option(help="The environment variable that holds its key.")] = "",
    plain: Plain = False,
) -> None:
    """Try held-out tasks several times with each harness; print pass@k and pass^k with intervals.

    `evaluation.heldout_episodes` tasks x `evaluation.trials` trials x `evaluation.harnesses`, at the run's sampling.
    Each harness is a run of its own, `<name>-eval-<harness>`, with an engine of its own, so this works beside a
    training run; eval.json, eval.html and trials.parquet go to `<name>-eval`. The same command resumes, and the
    same seed draws the same tasks. `--endpoint` takes the place of the section `engine`: a model that somebody else
    serves.
    ClawEval's pass@3 and pass^3: openforge eval examples/claw-eval.toml.
    """
    from openforge.cli.evaluate.outcome import lines, write_outcome  # slow to import

    if (model or key_env) and not endpoint:
        fail("--model and --key-env belong to --endpoint: name its URL", BAD_USE)
    if endpoint and not model:
        fail("--endpoint without --model: name the model that answers there", BAD_USE)
    config, name = load(run_file, [*(overrides or ()), *overrides_for(endpoint, model, key_env)]), ""
    try:
        config, name = _pinned(config, version)
    except NoSuchVersion as error:
        fail(str(error), BAD_USE)
    if problems := problems_of_evaluating(config):
        fail(str(BadRunFile(str(run_file), problems)), BAD_USE)
    config = with_model(config)
    check_endpoints(config)
    kept: dict[str, Kept] = {}
    for harness, run in runs_of(config, name).items():
        kept[harness] = _evaluated(run, plain)
    trials = {harness: one.trials for harness, one in kept.items()}
    evaluation = evaluated(
        trials,
        {harness: one.failed_attempts for harness, one in kept.items()},
        name=name,
        model=model_of(config),
        environment=config.environment.name,
        seed=config.run.seed,
        trials_per_task=config.evaluation.trials,
        ks=ks_of(config),
    )
    folder = Home(name).root
    write_outcome(folder, evaluation, trials)
    typer.echo("\n".join(lines(evaluation)))
    typer.echo("\n".join(os.path.relpath(folder / file) for file in ("eval.json", "eval.html", "trials.parquet")))


def _pinned(config: RunConfig, version: str) -> tuple[RunConfig, str]:
    """The configuration with the weights that were asked for, and the evaluation's name."""
    if not version:
        return config, f"{config.run.name}-eval"
    if config.engine.kind == "endpoint":
        raise NoSuchVersion(f"--version {version} with an endpoint: it serves its own model; leave one of them out")
    run, _, number = version.rpartition("@")
    if not run or not number.isdigit():
        raise NoSuchVersion(f"--version {version}: write RUN@VERSION, for example {config.run.name}@12")
    path = str(weights_of(run, int(number)))
    pinned = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=path))
    return pinned, f"{config.run.name}-eval-v{int(number)}"


def _evaluated(run: RunConfig, plain: bool) -> Kept:
    """What one harness's run said, read from its folder where it is complete."""
    home = Home(run.run.name)
    file, digest = home.root / "trials.json", canonical(run)[1]
    if file.is_file():
        kept = msgspec.json.decode(file.read_bytes(), type=Kept)
        if kept.digest == digest:
            return kept
    typer.echo(f"{run.run.name}: {run.evaluation.heldout_episodes} tasks x {run.evaluation.trials} trials")
    try:
        with home.held(), display(run, plain=plain) as shown:
            outcome = asyncio.run(conduct(run, home, shown.show, finish=_finish))
    except CANNOT_GO_ON as error:
        fail(str(error))
    _end_unless_complete(run, outcome)
    kept = msgspec.json.decode((home.root / "now.json").read_bytes(), type=Kept)
    (home.root / "now.json").replace(file)
    return kept


async def _finish(bus: Bus, config: RunConfig, home: Home) -> Summary:
    """The run's own report, and its trials up to now."""
    trials = await trials_of(bus, config.run.name)
    kept = Kept(digest=canonical(config)[1], trials=trials.rows(), failed_attempts=trials.failures())
    await asyncio.to_thread((home.root / "now.json").write_bytes, msgspec.json.encode(kept))
    return await write_summary_and_report(bus, config, home)


def _end_unless_complete(run: RunConfig, outcome: Outcome) -> None:
    if outcome.reason is StopReason.COMPLETED:
        return
    typer.echo(f"{run.run.name} stopped: {outcome.reason}. {outcome.detail}", err=True)
    raise typer.Exit(EXIT[outcome.reason])
