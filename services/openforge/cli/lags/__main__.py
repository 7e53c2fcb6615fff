"""`python -m openforge.cli.lags`: learning curves and speed of one run file at several `max_lag`."""

import asyncio
import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from openforge.cli.curves import machine
from openforge.cli.home import Home
from openforge.cli.lags.compare import compared
from openforge.cli.lags.measured import Cost, Measured, measured, train
from openforge.cli.lags.page import draw, table
from openforge.runs import load_run_file


def main(
    run_file: Annotated[Path, typer.Argument(help="The run to repeat.")] = Path("examples/tiny.toml"),
    lags: Annotated[str, typer.Option(help="Values of pacing.max_lag, 0 among them.")] = "0,1,2,4",
    seeds: Annotated[int, typer.Option(min=1, help="Values of run.seed: 1 to so many.")] = 3,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="As of `openforge train`, for all runs.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for results.json and curves.svg.")] = Path("docs/lags"),
) -> None:
    """Train at each max_lag with each seed, all values of a seed in turn, and compare with the synchronous run.

    In flight are `max_lag` + 1 batches, so that the bound is used. What ran before is not run again: a run of the same
    name that ended is read from its folder. Results are written after each seed.
    """
    asked = [int(lag) for lag in lags.split(",")]
    if 0 not in asked:
        raise typer.BadParameter(f"--lags {lags} lacks 0, the synchronous run that the others are compared with")
    out.mkdir(parents=True, exist_ok=True)
    runs: list[Measured] = []
    for seed in range(1, seeds + 1):
        runs += [_run(run_file, lag, seed, overrides or []) for lag in asked]
        _write(runs, out)


def _run(run_file: Path, lag: int, seed: int, overrides: list[str]) -> Measured:
    """The run, from its folder where it ended before."""
    config = load_run_file(run_file, overrides)
    batch = config.pacing.groups_per_step * config.pacing.group_size
    name = f"{config.run.name}-lag{lag}-{seed}"
    note = Home(name).root / "measured.json"
    if note.exists():
        return msgspec.json.decode(note.read_bytes(), type=Measured)
    placed = (f"run.name={name}", f"run.seed={seed}", f"pacing.max_lag={lag}", f"pacing.in_flight={batch * (lag + 1)}")
    cost: Cost = train(run_file, (*overrides, *placed))
    found = asyncio.run(measured(name, cost))
    note.write_bytes(msgspec.json.encode(found))
    return found


def _write(runs: list[Measured], out: Path) -> None:
    cores = os.cpu_count() or 1
    rows = compared(runs, cores)
    result = {"machine": machine(), "lags": rows, "runs": runs}
    (out / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    draw(runs, out / "curves.svg")
    typer.echo("\n".join(table(rows)))


if __name__ == "__main__":
    typer.run(main)
