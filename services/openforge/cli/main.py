"""`openforge`: what a person can do, one module for each command."""

import errno
import logging
import sys

import typer

from openforge.cli import (
    bench_command,
    bus_command,
    checkpoint_command,
    doctor_command,
    env_command,
    export_command,
    ledger,
    metrics_command,
    model,
    protos,
    report_command,
    sandbox_command,
    sink_command,
    status,
    stop,
    tail,
    train,
)
from openforge.cli.conformance import command as conformance_command
from openforge.cli.evaluate.command import evaluate
from openforge.cli.words import Words

app = typer.Typer(
    name="openforge",
    help="Trains LLM agents inside their real harness. Begin with `openforge train RUN.toml`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(train.train)
app.command()(train.up)
app.command("eval")(evaluate)
app.command()(stop.stop)
app.command()(stop.pause)
app.command()(stop.resume)
app.command()(status.status)
app.command()(doctor_command.doctor)
app.command()(tail.tail)
app.command()(ledger.ledger)
app.command()(metrics_command.metrics)
app.command()(sink_command.sink)
app.command()(report_command.report)
app.command()(export_command.export)
app.command("import")(export_command.import_)
app.add_typer(checkpoint_command.app, name="checkpoint")
app.add_typer(model.app, name="model")
app.add_typer(env_command.app, name="env")
app.add_typer(sandbox_command.app, name="sandbox")
app.command(context_settings=bench_command.PASSED_ON)(bench_command.bench)
app.command()(conformance_command.conformance)
app.add_typer(bus_command.app, name="bus")
app.add_typer(protos.app, name="protos")


# Places that a person named, or a disk without room. Any other error is a fault of ours and shows where it lies.
_OF_PLACES = {
    errno.ENOENT: "name one that is there",
    errno.ENOTDIR: "name another",
    errno.EISDIR: "name a file",
    errno.EEXIST: "name another, or remove it",
    errno.ENAMETOOLONG: "name a shorter one",
    errno.EACCES: "name one that you may read and write",
    errno.EPERM: "name one that you may read and write",
    errno.EROFS: "name one that can be written",
    errno.EIO: "look what ails that disk, or name a place on another",
    errno.ENOSPC: "make room on that disk, or name a place on another",
    errno.EDQUOT: "make room on that disk, or name a place on another",
}


def main() -> None:
    if logging.lastResort is not None:  # what speaks where nobody has set up logs, on whatever stderr is by then
        logging.lastResort.setFormatter(Words())
    try:
        app()
    except OSError as error:
        if error.errno not in _OF_PLACES:
            raise
        print(f"openforge: {error}: {_OF_PLACES[error.errno]}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
