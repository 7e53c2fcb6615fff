"""`openforge`: what a person can do, one module for each command."""

import importlib
import importlib.util

import typer

from openforge.cli import bench_command, env_command, ledger, model, protos, status, stop, tail

# Commands that live beside these and are plugged in where they are there: module, functions.
PLUGGED = (("openforge.cli.train", ("train", "up")), ("openforge.cli.report_command", ("report",)))

app = typer.Typer(
    name="openforge",
    help="Trains LLM agents inside their real harness. Begin with `openforge train RUN.toml`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for _module, _names in PLUGGED:
    if importlib.util.find_spec(_module):
        for _name in _names:
            app.command(_name)(getattr(importlib.import_module(_module), _name))

app.command()(stop.stop)
app.command()(stop.pause)
app.command()(stop.resume)
app.command()(status.status)
app.command()(tail.tail)
app.command()(ledger.ledger)
app.add_typer(model.app, name="model")
app.add_typer(env_command.app, name="env")
app.command(context_settings=bench_command.PASSED_ON)(bench_command.bench)
app.add_typer(protos.app, name="protos")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
