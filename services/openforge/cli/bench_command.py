"""`openforge bench`: every measurement is a module of `openforge.cli.bench` with a `--json` of its own."""

import pkgutil
import signal
import subprocess
import sys
from typing import Annotated

import msgspec
import typer

from openforge.cli import bench as benches
from openforge.cli.reach import BAD_USE, fail
from openforge.service import die_with_parent

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(benches.__path__) if not module.name.startswith("_"))


def _measured(command: list[str], stdout: int | None = None) -> subprocess.CompletedProcess[bytes]:
    """It ends with us, as by Ctrl-C: with all that it started."""
    return subprocess.run(command, stdout=stdout, check=False, preexec_fn=_with_us)


def _with_us() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # who starts us in the background may have it ignored
    die_with_parent(signal.SIGINT)


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
        raise typer.Exit(_measured(command).returncode)
    measured = _measured([*command, "--json"], stdout=subprocess.PIPE)
    if measured.returncode:
        typer.echo(measured.stdout.decode(errors="replace"), err=True)
        fail(f"bench {name} ended with exit code {measured.returncode}", measured.returncode)
    try:
        typer.echo(msgspec.json.encode(msgspec.json.decode(measured.stdout, type=dict)).decode())
    except msgspec.MsgspecError as error:
        typer.echo(measured.stdout.decode(errors="replace"), err=True)
        fail(f"bench {name} did not print one JSON object: {error}")
