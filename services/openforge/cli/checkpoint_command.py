"""`openforge checkpoint`: what a learner has saved, and one of it as a plain model."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from openforge.cli.home import Home
from openforge.cli.reach import BAD_USE, fail, run_on_bus
from openforge.learner.checkpoints import MEMORY, Checkpoint, Checkpoints, ForeignCheckpoint, best_first
from openforge.learner.plain import Unreadable, policy_of, write_adapter, write_plain
from openforge.models import UnknownModel, resolve
from openforge.protos import BadKey, token
from openforge.runs import BadRunFile, RunConfig, UnknownRun, config_of, state_of
from openforge.weights import Dtype

app = typer.Typer(help="What the learner of a run saved, and how to take a model out of it.", no_args_is_help=True)

Run = Annotated[str, typer.Argument(help="The run's name.", show_default=False)]
LAST, BEST = "last", "best"


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint as it is listed. `reward` is null where no release noted it; `saved_at` is Unix time."""

    version: int
    reward: float | None
    bytes: int
    saved_at: float
    last: bool
    best: bool
    folder: str


@app.command("list")
def list_checkpoints(
    run: Run, as_json: Annotated[bool, typer.Option("--json", help="One JSON object and nothing else.")] = False
) -> None:
    """The checkpoints that are whole, newest first, with the mean reward of the batches before each."""
    found = whole(run)
    listed = kept(found)
    if as_json:
        typer.echo(msgspec.json.encode({"run": run, "checkpoints": listed}).decode())
    else:
        typer.echo("\n".join(lines(listed)))


@app.command("export")
def export(
    run: Run,
    out: Annotated[Path, typer.Argument(help="A folder that does not exist yet.", show_default=False)],
    version: Annotated[str, typer.Option(help="A version of `openforge checkpoint list`, best or last.")] = LAST,
    dtype: Annotated[Dtype | None, typer.Option(help="That of the run's engine where left out.")] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="The LoRA adapters alone, for peft.")] = False,
) -> None:
    """Write the policy of a checkpoint as a plain Hugging Face folder, LoRA adapters merged in.

    `transformers.AutoModelForCausalLM.from_pretrained(OUT)` loads it, and so does every engine.
    """
    if out.exists():
        fail(f"OUT {out} is already there: choose another path or remove it", BAD_USE)
    checkpoint = chosen(run, whole(run), version)
    config = config_for(run, checkpoint)
    if adapter and not config.learner.lora.rank:
        fail(f"run {run!r} trained all weights (learner.lora.rank = 0), so it has no adapters: drop --adapter", BAD_USE)
    try:
        policy = policy_of(checkpoint, config)
        (write_adapter if adapter else write_plain)(policy, config, out, dtype or config.engine.dtype)
    except ImportError as error:
        fail(f"{error.name} is not installed: pip install 'openforge[learner]'")
    except Unreadable as error:
        fail(str(error))
    except OSError as error:
        fail(f"OUT {out} cannot be written ({error.strerror}): choose a folder on a disk that takes it")
    typer.echo(f"{out}: version {checkpoint.version} of run {run}, from {checkpoint.folder}")


def whole(run: str) -> list[Checkpoint]:
    """All that can be used, newest first; ends the command where there is none."""
    try:
        root = Home(token("run", run)).root
        found = list(Checkpoints(root / "checkpoints").newest_first())
    except (BadKey, ForeignCheckpoint) as error:
        fail(str(error), BAD_USE)
    if not root.is_dir():
        fail(
            f"run {run!r} has no folder {root}: go to the folder where it was started, or set OPENFORGE_RUNS to the "
            "folder of runs",
            BAD_USE,
        )
    if not found:
        fail(
            f"run {run!r} has no whole checkpoint in {root / 'checkpoints'}: its learner saves one every "
            "learner.checkpoint_every steps and when it is stopped"
        )
    return found


def chosen(run: str, found: list[Checkpoint], version: str) -> Checkpoint:
    """The checkpoint that `version` names; ends the command where there is none."""
    known = ", ".join(str(checkpoint.version) for checkpoint in found)
    if version not in (LAST, BEST) and not version.isdecimal():
        fail(f"--version {version} is none of best, last or a number: choose one of {known}", BAD_USE)
    if version == BEST:
        wanted = best_first(found)
    else:
        wanted = [one for one in found if version == LAST or one.version == int(version)]
    if not wanted and version == BEST:
        fail(f"--version best: no checkpoint of run {run!r} has a reward noted: choose last or one of {known}", BAD_USE)
    if not wanted:
        fail(f"run {run!r} has no checkpoint of --version {version}: choose best, last or {known}", BAD_USE)
    return wanted[0]


def config_for(run: str, checkpoint: Checkpoint) -> RunConfig:
    """The settings that the checkpoint holds, or those on the run's bus where an older release wrote it, with the
    folder of the model in them."""
    text = checkpoint.memory.config or run_on_bus(run, lambda bus: state_of(bus, run)).config
    try:
        config = config_of(text) if text else fail(str(UnknownRun(run)), BAD_USE)
        model = msgspec.structs.replace(config.model, path=str(resolve(config.model.path)))
    except BadRunFile as error:
        fail(f"{checkpoint.folder} was made with settings that this release does not know: {error}", BAD_USE)
    except UnknownModel as error:
        fail(f"config and tokenizer come from the model that the run began with. {error}", BAD_USE)
    return msgspec.structs.replace(config, model=model)


def kept(found: list[Checkpoint]) -> list[Kept]:
    best = best_first(found)[:1]
    return [
        Kept(
            version=checkpoint.version,
            reward=checkpoint.reward,
            bytes=checkpoint.bytes,
            saved_at=(checkpoint.folder / MEMORY).stat().st_mtime,
            last=checkpoint is found[0],
            best=checkpoint in best,
            folder=str(checkpoint.folder),
        )
        for checkpoint in found
    ]


def lines(listed: list[Kept]) -> Iterator[str]:
    """The list as a person reads it."""
    yield f"{'version':>8}{'reward':>9}{'MB':>10}  {'saved (UTC)':<21}"
    for one in listed:
        reward = "-" if one.reward is None else f"{one.reward:.4f}"
        saved = datetime.fromtimestamp(one.saved_at, UTC).strftime("%Y-%m-%d %H:%M:%S")
        marks = ", ".join(mark for mark, is_so in ((LAST, one.last), (BEST, one.best)) if is_so)
        yield f"{one.version:>8}{reward:>9}{one.bytes / 1e6:>10.1f}  {saved:<21}{marks}".rstrip()
