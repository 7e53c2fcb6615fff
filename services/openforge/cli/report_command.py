"""`openforge report`: the page of a run, written again from its streams."""

from typing import Annotated

import typer

from openforge.bus import Bus
from openforge.cli.finish import write_summary_and_report
from openforge.cli.home import Home
from openforge.cli.reach import BAD_USE, fail, run_on_bus
from openforge.runs import RunConfig, UnknownRun, config_of, state_of
from openforge.runs.model import model_folder


def report(run: Annotated[str, typer.Argument(help="The run's name.", show_default=False)]) -> None:
    """Write summary.json and one self-contained HTML page of a run, also while it works, and print where.

    The page shows reward, held-out success, lag, the ledger, failures by cause, and episodes turn by turn.
    """
    home = Home(run)
    run_on_bus(run, lambda bus: _write(bus, home))
    typer.echo(home.report)


async def _write(bus: Bus, home: Home) -> None:
    state = await state_of(bus, home.run)
    if state.phase == "absent":
        fail(str(UnknownRun(home.run)), BAD_USE)
    config = config_of(state.config)
    _prepare(home, config)
    await write_summary_and_report(bus, config, home)


def _prepare(home: Home, config: RunConfig) -> None:
    if config.model.path:
        _need_tokenizer(config.model.path)
    home.root.mkdir(parents=True, exist_ok=True)


def _need_tokenizer(model: str) -> None:
    """Exits where it is not here."""
    try:
        folder = model_folder(model)
    except FileNotFoundError as error:
        fail(str(error))
    if not (folder / "tokenizer.json").is_file():
        fail(f"model.path = {folder} has no tokenizer.json on this machine: put the model's folder there")
