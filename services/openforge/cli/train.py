"""`openforge train` and `openforge up`: a run from one command, on this machine or on a deployment."""

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from openforge.bus import BadSettings, BusError
from openforge.bus.server import NoServerBinary
from openforge.cli.conduct import Outcome, conduct, stand_by
from openforge.cli.display import display, lost
from openforge.cli.home import Home, Unusable
from openforge.cli.reach import BAD_USE, fail
from openforge.cli.remote import Detached, conduct_remotely, settings_for
from openforge.cli.supervise import GaveUp
from openforge.endpoint import Address, BadEndpoint, Endpoint
from openforge.models import UnknownModel, builtin_folder, get, resolve
from openforge.models.smollm2 import ModelUnavailable
from openforge.protos import StopReason
from openforge.runs import BadRunFile, RunConfig, RunDiffers, load_run_file
from openforge.runs.model import BUILTIN
from openforge.runs.progress import Progress

INTERRUPTED = 130
# What ends a run before or beside its own reasons; each message says what to do.
CANNOT_GO_ON = (Unusable, GaveUp, RunDiffers, BadSettings, NoServerBinary, BusError)
EXIT = {StopReason.COMPLETED: 0, StopReason.INTERRUPTED: INTERRUPTED, StopReason.NO_PROGRESS: 4, StopReason.FAILED: 1}

RunFile = Annotated[Path, typer.Argument(help="The run file (TOML).", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override a field, e.g. --set run.seed=2. May be repeated.")
]
Plain = Annotated[bool, typer.Option("--plain", help="Plain lines instead of the live panel.")]


def train(
    run_file: RunFile,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the file and say what would happen.")] = False,
    plain: Plain = False,
    remote: Annotated[
        str, typer.Option("--remote", metavar="NATS_URL", help="Submit to the deployment of this bus, and follow it.")
    ] = "",
) -> None:
    """Start or resume a run on this machine: bus, six services, progress, summary and report.

    Ctrl-C stops everything in good order (exit code 130); the same command resumes. Exit codes: 0 trained all its
    steps, 1 a service gave up, 2 bad run file or an endpoint of it that cannot be used, 4 no progress.

    With --remote nothing is started: the run is submitted to services that work already, or joined where it goes on.
    Ctrl-C then detaches, and `openforge stop` ends it. OPENFORGE_NATS_NKEY_SEED_FILE names the operator's seed.
    """
    config = load(run_file, overrides)
    if dry_run:
        typer.echo(plan(config, remote))
    elif remote:
        _train_remotely(config, remote, plain)
    else:
        _train_here(config, plain)


def _train_here(config: RunConfig, plain: bool) -> None:
    config = with_model(config)
    check_endpoints(config)
    home = Home(config.run.name)
    try:
        with home.held(), display(config, plain=plain) as shown:
            outcome = asyncio.run(conduct(config, home, shown.show))
    except CANNOT_GO_ON as error:
        fail(str(error))
    say_end(config, outcome)
    typer.echo(f"summary {os.path.relpath(home.summary)}\nreport  {os.path.relpath(home.report)}")
    raise typer.Exit(EXIT[outcome.reason])


def _train_remotely(config: RunConfig, url: str, plain: bool) -> None:
    try:
        if config.model.path.startswith(BUILTIN):
            builtin_folder(config.model.path.removeprefix(BUILTIN))
        settings = settings_for(url)
    except (UnknownModel, BadSettings) as error:
        fail(str(error), BAD_USE)
    try:
        with display(config, plain=plain) as shown:
            outcome = asyncio.run(conduct_remotely(config, settings, shown.show))
    except Detached as detached:
        typer.echo(str(detached))
        raise typer.Exit(INTERRUPTED) from None
    except CANNOT_GO_ON as error:
        fail(str(error))
    say_end(config, outcome)
    raise typer.Exit(EXIT[outcome.reason])


def up(run_file: RunFile, overrides: Overrides = None) -> None:
    """Start the bus and the services of a run and keep them running, without submitting it.

    For clients that submit by themselves. Ctrl-C stops everything. Exit codes are those of train.
    """
    config = with_model(load(run_file, overrides))
    check_endpoints(config)
    home = Home(config.run.name)
    try:
        with home.held():
            asyncio.run(stand_by(config, home, typer.echo))
    except CANNOT_GO_ON as error:
        fail(str(error))


def plan(config: RunConfig, remote: str = "") -> str:
    """What the run would do, in words, and its complete configuration."""
    pacing, evaluation = config.pacing, config.evaluation
    per_step = pacing.groups_per_step * pacing.group_size
    larger = f"; batches take up to {pacing.groups_per_step_most} groups" if pacing.groups_per_step_most else ""
    evaluations = [when for when, on in (("before", evaluation.before), ("after", evaluation.after)) if on]
    held_out = f"{evaluation.heldout_episodes} held-out episodes {' and '.join(evaluations)} training"
    return "\n".join(
        (
            f"run {config.run.name}: {config.run.steps} steps of {pacing.groups_per_step} groups x "
            f"{pacing.group_size} episodes = {config.run.steps * per_step} episodes, plus refills{larger}",
            _model_and_engine(config),
            *(() if remote else _missing_model(config)),
            f"harness {config.environment.harness} in environment {config.environment.name}, "
            f"{len(config.environment.tasks) or 'all'} kinds of tasks, at most {pacing.in_flight} episodes at once",
            f"learner {config.learner.backend}: {config.algorithm.loss} with {config.algorithm.advantage} advantages, "
            f"max_lag {pacing.max_lag} ({pacing.staleness})",
            *_published(config),
            held_out if evaluation.heldout_episodes and evaluations else "no held-out evaluation",
            f"submitted to {remote}" if remote else f"everything goes to {Home(config.run.name).root}",
            "",
            msgspec.json.format(msgspec.json.encode(config), indent=2).decode(),
        )
    )


def _published(config: RunConfig) -> Iterator[str]:
    if config.engine.kind == "endpoint":
        return
    store, kept = config.weights.store, config.engine.keep_versions
    if store.startswith("s3://"):
        yield f"weights published at {store}, the {kept} newest kept; credentials by the AWS variables"
    elif store == "nats":
        yield f"weights published in the bus's object store of_weights, the {kept} newest kept"
    else:
        folder = store or "the learner's own folder"
        yield f"weights published in {folder}, which engines have to see, the {kept} newest kept"


def _model_and_engine(config: RunConfig) -> str:
    engine = config.engine
    if engine.kind == "endpoint":
        return f"model {engine.model} at {engine.url}, which somebody else serves"
    return f"model {config.model.path} on the {engine.kind} engine ({engine.dtype})"


def _missing_model(config: RunConfig) -> Iterator[str]:
    """A plan may name a model that only another machine has; a run may not."""
    if config.engine.kind == "endpoint":
        return
    try:
        resolve(config.model.path)
    except UnknownModel as error:
        yield f"  not here: {error}"


def load(run_file: Path, overrides: list[str] | None) -> RunConfig:
    """The checked run file; exits with 2 and the reasons."""
    try:
        return load_run_file(run_file, overrides or ())
    except BadRunFile as error:
        fail(str(error), BAD_USE)


def with_model(config: RunConfig) -> RunConfig:
    """The config with the folder of its model, a built-in one made if need be; exits with 2 where there is none.

    A run against an endpoint has no model here, whatever the file names.
    """
    if config.engine.kind == "endpoint":
        return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=""))
    try:
        builtin = config.model.path.removeprefix(BUILTIN)
        folder = get(builtin) if builtin != config.model.path else resolve(config.model.path)
    except (UnknownModel, ModelUnavailable) as error:
        fail(f"model.path: {error}", BAD_USE)
    if not folder.joinpath("tokenizer.json").is_file():
        fail(f"model.path = {folder} has no tokenizer.json: give a Hugging Face folder that has one", BAD_USE)
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(folder)))


def check_endpoints(config: RunConfig) -> None:
    """Exits with 2 where one that the run asks is not there, refuses the key or lacks the model."""
    asked = {"engine": config.engine if config.engine.kind == "endpoint" else None, "judge": config.judge}
    for section, said in asked.items():
        if said is not None and said.url:
            try:
                asyncio.run(_check(Address(section=section, url=said.url, model=said.model, key_env=said.key_env)))
            except BadEndpoint as error:
                fail(str(error), BAD_USE)


async def _check(address: Address) -> None:
    async with Endpoint(address) as endpoint:
        await endpoint.check()


def say_end(config: RunConfig, outcome: Outcome) -> None:
    if outcome.reason is not StopReason.COMPLETED:
        typer.echo(f"{config.run.name} stopped: {outcome.reason}. {outcome.detail}", err=True)
    width = shutil.get_terminal_size().columns
    typer.echo("-" * min(width, 60))
    unmeasured = set(_unmeasured(config, outcome.progress))
    for name, value in msgspec.to_builtins(outcome.summary).items():
        if name not in unmeasured:
            typer.echo(f"{name:32} {value:.4g}" if isinstance(value, float) else f"{name:32} {value}")
    typer.echo(f"lost: {lost(outcome.progress)}")


def _unmeasured(config: RunConfig, progress: Progress) -> Iterator[str]:
    """Numbers that stand at 0 because nothing was held out yet: shown, they would read like failures."""
    before, after = (progress.evaluations.get(version) for version in (0, config.run.steps))
    if before is None or not before.rewards:
        yield "success_heldout_before"
    if after is None or not after.rewards:
        yield from ("success_heldout_after", "success_heldout_after_low")
