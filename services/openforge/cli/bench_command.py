"""`openforge bench`: every measurement is a module of `openforge.cli.bench` with a `--json` of its own."""

import pkgutil
import subprocess
import sys
from typing import Annotated

import msgspec
import typer

from openforge.cli import bench as benches
from openforge.cli.children import run
from openforge.cli.reach import BAD_USE, fail

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(benches.__path__) if not module.name.startswith("_"))


def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="What to measure; the list where it is left out.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object and nothing else on stdout.")] = False,
) -> None:
    """Measure what something costs on this machine. Other options go to the measurement itself."""
    if name is None:
        typer.echo("\n".join(names()))
        return
    if name not in names():
        fail(f"there is no measurement {name!r}: choose from {', '.join(names())}", BAD_USE)
    command = [sys.executable, "-m", f"{benches.__name__}.{name}", *context.args]
    if not as_json:
        raise typer.Exit(run(command).returncode)
    measured = run([*command, "--json"], stdout=subprocess.PIPE)
    if measured.returncode:
        typer.echo(measured.stdout.decode(errors="replace"), err=True)
        fail(f"bench {name} ended with exit code {measured.returncode}", measured.returncode)
    try:
        typer.echo(msgspec.json.encode(msgspec.json.decode(measured.stdout, type=dict)).decode())
    except msgspec.MsgspecError as error:
        typer.echo(measured.stdout.decode(errors="replace"), err=True)
        fail(f"bench {name} did not print one JSON object: {error}")
