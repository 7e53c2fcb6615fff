"""`openforge protos`: what the services say to each other."""

from pathlib import Path
from typing import Annotated

import typer

from openforge.protos import schema as schemas

app = typer.Typer(help="What the services say to each other, for tools that do not read Python.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `schema` a command of its own while it is the only one."""


@app.command()
def schema(
    out: Annotated[Path, typer.Option(help="The folder of the documents.")] = Path(schemas.DEFAULT_FOLDER),
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 where the files differ.")] = False,
) -> None:
    """Write JSON Schema and AsyncAPI of all facts, made from the code."""
    raise typer.Exit(schemas.main(["--out", str(out), *(["--check"] if check else [])]))
