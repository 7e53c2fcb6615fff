"""`openforge bus`: who may do what on a bus that is not `openforge train`'s own."""

import contextlib
import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from openforge.bus import Bus
from openforge.bus.credentials import Credentials
from openforge.bus.permissions import CONSUMER
from openforge.cli.home import Home
from openforge.cli.reach import BAD_USE, fail, run_on_bus
from openforge.protos import BadKey

app = typer.Typer(help="Credentials and streams of a bus.", no_args_is_help=True)


@app.command()
def credentials(
    out: Annotated[Path | None, typer.Option("--out", help="The folder of the seeds; made if need be.")] = None,
    run: Annotated[
        str,
        typer.Option("--run", help="Bind the workers to this run, as OPENFORGE_RUN does; without --out, its folder."),
    ] = "",
    consumer: Annotated[
        list[str] | None, typer.Option("--consumer", help="A reader's name; it may resume by it. May be repeated.")
    ] = None,
) -> None:
    """Make nkey seeds for every service, the operator and the named consumers, and the server's `users.conf`.

    Include `users.conf` within `authorization { }` of the server's configuration, and reload the server (SIGHUP)
    when it changed; for a run that works on this machine that is done here. Each service gets its own seed as
    OPENFORGE_NATS_NKEY_SEED_FILE. Seeds that exist stay.
    """
    if out is None and not run:
        fail("say --out FOLDER, or --run RUN for the folder of a run on this machine", BAD_USE)
    home = Home(run) if out is None else None
    if home is not None and not home.root.is_dir():
        fail(f"--run {run}: there is no folder {home.root}; start the run, or set OPENFORGE_RUNS", BAD_USE)
    made = home.credentials() if home is not None else Credentials(Path(out or ""), run=run or "*")
    try:
        for seed in made.make(consumer or ()):
            typer.echo(str(seed))
    except BadKey as error:
        fail(f"--consumer: {error}", BAD_USE)
    typer.echo(str(made.users))
    if home is not None:
        _let_in(home)
    if home is not None and (address := home.address()) is not None:
        typer.echo(f"OPENFORGE_NATS_URL={address.nats_url}  # while the run works")
    for name in consumer or ():
        typer.echo(f"OPENFORGE_NATS_NKEY_SEED_FILE={made.seed(CONSUMER, name)}  # for the consumer {name}")


def _let_in(home: Home) -> None:
    """The run's server reads its users again, if it runs."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        if home.address() is not None:
            os.kill(int((home.nats / "nats.pid").read_text()), signal.SIGHUP)


@app.command("set-up")
def set_up() -> None:
    """Make the streams and stores at OPENFORGE_NATS_URL, as its operator: services with own credentials may not."""

    async def make(bus: Bus) -> None:
        await bus.set_up()

    run_on_bus(None, make)
