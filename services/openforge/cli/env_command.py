"""`openforge env`: environments, the proof that they work, and new ones."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from openforge.cli.reach import BAD_USE, fail
from openforge.env import check as checks
from openforge.env.contract import HarnessKind
from openforge.env.new import CannotCreate, new_environment
from openforge.env.registry import BadEnvironment, NoSuchEnvironment, environments, load_environment, select
from openforge.env.task_file import BadTask
from openforge.runs import BadRunFile, load_run_file

app = typer.Typer(
    help="Environments: tasks, the harnesses that do them, and how they are verified.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(help="An installed environment, or the path of an env.py.", show_default=False)]


@app.command("list")
def list_environments(
    environment: Annotated[str | None, typer.Argument(help="Show the tasks and harnesses of this one.")] = None,
) -> None:
    """The environments that can be loaded here."""
    if environment is None:
        typer.echo("\n".join(environments()) or "none is installed")
        return
    try:
        module = load_environment(environment)
        templates = select(module, ())
    except (NoSuchEnvironment, BadEnvironment, BadTask) as error:
        fail(str(error), BAD_USE)
    typer.echo("harnesses: " + ", ".join(f"{name} ({kind})" for name, kind in module.HARNESSES.items()))
    typer.echo("tasks: " + ", ".join(template.id for template in templates))


@app.command()
def check(
    environment: Name,
    tasks: Annotated[str, typer.Option(help="Ids, separated by commas; all tasks where it is left out.")] = "",
    seeds: Annotated[int, typer.Option(min=1, max=10_000, help="How many instances of each split.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object and nothing else.")] = False,
    judge_url: Annotated[str, typer.Option(help="The OpenAI-compatible endpoint that checks may ask.")] = "",
    judge_model: Annotated[str, typer.Option(help="The model that judges.")] = "",
    judge_key_env: Annotated[str, typer.Option(help="The environment variable that holds the judge's key.")] = "",
) -> None:
    """Prove of each task in real sandboxes: the reference passes, no work fails, verdicts repeat.

    Exit codes: 0 all do, 1 some task does not, 2 there is no such environment or task.
    """
    arguments = [environment, "--tasks", tasks, "--seeds", str(seeds), *(["--json"] if as_json else [])]
    arguments += ["--judge-url", judge_url, "--judge-model", judge_model, "--judge-key-env", judge_key_env]
    raise typer.Exit(checks.main(arguments))


@app.command()
def rollouts(
    raw: Annotated[Path, typer.Argument(help="Raw tasks, as parquet.", show_default=False)],
    run: Annotated[Path, typer.Option(help="The run file that says how they are run.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The parquet file to write.", show_default=False)],
) -> None:
    """Convert raw tasks to rollouts, the one file that training and evaluation draw from (docs/environments.md)."""
    from openforge.env.rollouts import Rollout, convert  # slow to import

    try:
        config = load_run_file(run)
        environment, limits = config.environment, config.environment.limits
        rollout = Rollout(
            env_class=load_environment(environment.name).HARNESSES[environment.harness],
            env_module=environment.name,
            env_config=msgspec.json.encode(environment.options).decode(),
            harness=environment.harness,
            memory_mb=limits.memory_mb,
            pids=limits.pids,
            disk_mb=limits.disk_mb,
            cpus=limits.cpus,
            episode_timeout_s=limits.timeout_s,
            max_steps=limits.turns,
            llm_args=msgspec.json.encode(config.sampling).decode(),
        )
        written = convert(raw, out, rollout)
    except (BadRunFile, BadTask) as error:
        fail(str(error), BAD_USE)
    typer.echo(f"{out}: {written} tasks")


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="A lower-case word.", show_default=False)],
    parent: Annotated[Path, typer.Option("--in", help="The folder to put it in.")] = Path(),
    kind: Annotated[
        HarnessKind,
        typer.Option(help="command: a program in the sandbox. pipeline: code in an env host. direct: our own loop."),
    ] = "command",
) -> None:
    """Write a small environment that works, to change into yours."""
    try:
        folder = new_environment(name, parent, kind)
    except CannotCreate as error:
        fail(str(error), BAD_USE)
    typer.echo(f"{folder}: change env.py and tasks/, then `openforge env check {folder}/env.py`")
