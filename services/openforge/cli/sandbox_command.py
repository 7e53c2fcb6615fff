"""`openforge sandbox`: sandboxes for programs that are not ours."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Sandboxes over HTTP, for clients of Orchard's API.", no_args_is_help=True)


@app.command()
def serve(
    port: Annotated[int, typer.Option(help="Where to listen.", min=1, max=65535)] = 8000,
    host: Annotated[
        str, typer.Option(help="An address of this machine; others can reach it by its own.")
    ] = "127.0.0.1",
    home: Annotated[Path, typer.Option(help="Where records of sandboxes are kept.")] = Path("runs/.sandboxes"),
    warm: Annotated[int, typer.Option(help="So many sandboxes are made ahead.", min=0)] = 0,
    trusted_only: Annotated[bool, typer.Option(help="Accept reduced isolation, where there is no root.")] = False,
) -> None:
    """Serve sandboxes until stopped. Keys come from OPENFORGE_SANDBOX_API_KEYS, other settings from the environment."""
    settings = {
        "SANDBOX_API_PORT": str(port),
        "SANDBOX_API_HOST": host,
        "SANDBOX_API_WARM": str(warm),
        "HOME": str(home.absolute()),
        "TRUSTED_ONLY": str(trusted_only).lower(),
    }
    env = {**os.environ, **{f"OPENFORGE_{name}": value for name, value in settings.items()}}
    os.execve(sys.executable, [sys.executable, "-m", "openforge.sandbox_manager.api"], env)
