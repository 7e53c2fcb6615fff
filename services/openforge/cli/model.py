"""`openforge model`: checkpoint folders that a run file can name."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from openforge.cli.reach import BAD_USE, fail
from openforge.models import UnknownModel, builtin_folder, get, models_home, tiny
from openforge.models.find import BUILTIN
from openforge.models.smollm2 import ModelUnavailable

app = typer.Typer(help="Checkpoint folders. A run file names one by path, or as `builtin:NAME`.", no_args_is_help=True)

To = Annotated[Path | None, typer.Option("--to", help="Copy the folder there as well.", show_default=False)]


@app.command("get")
def get_model(name: Annotated[str, typer.Argument(help=f"One of {', '.join(BUILTIN)}.")], to: To = None) -> None:
    """Make a built-in model on this machine, unless it is there, and print its folder."""
    try:
        folder = get(name)
    except UnknownModel as error:
        fail(str(error), BAD_USE)
    except ModelUnavailable as error:
        fail(str(error))
    if to is not None:
        if to.exists():
            fail(f"--to {to} is already there: choose another path or remove it", BAD_USE)
        try:
            folder = Path(shutil.copytree(folder, to))
        except OSError as error:
            fail(f"--to {to} cannot be written ({error.strerror or error}): choose a folder on a disk that takes it")
    typer.echo(folder)


@app.command("tiny")
def tiny_model(
    folder: Annotated[Path, typer.Argument(help="Where to write it.", show_default=False)],
    seed: Annotated[int, typer.Option(help="Draws the weights.")] = 0,
    layers: int = 2,
    hidden: int = 64,
    context: Annotated[int, typer.Option(help="The window in tokens.")] = 2048,
    experts: Annotated[int, typer.Option(help="A mixture of so many experts; each token goes through two.")] = 0,
) -> None:
    """Write a tiny random model whose tokens are bytes: for tests and smoke runs."""
    if folder.exists():
        fail(f"FOLDER {folder} is already there: choose another path or remove it", BAD_USE)
    try:
        typer.echo(tiny(folder, seed=seed, layers=layers, hidden=hidden, context=context, experts=experts))
    except ValueError as error:
        fail(str(error), BAD_USE)


@app.command("list")
def list_models() -> None:
    """The built-in models and whether they are on this machine."""
    typer.echo(f"in {models_home()}:")
    for name in BUILTIN:
        there = builtin_folder(name).joinpath("config.json").exists()
        typer.echo(f"  {name:<16}{'ready' if there else f'run `openforge model get {name}`'}")
