"""`python -m openforge.cli.lags`: learning curves and speed of one run file at several `max_lag`."""

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from openforge.cli.curves import machine
from openforge.cli.home import Home
from openforge.cli.lags.compare import compared, learned
from openforge.cli.lags.measured import Curve, Measured, measured, train
from openforge.cli.lags.page import draw, learned_table, table
from openforge.cli.train import load, with_model
from openforge.runs import RunConfig

app = typer.Typer(help=__doc__, no_args_is_help=True)

RunFile = Annotated[Path, typer.Argument(help="The run to repeat.")]
Lags = Annotated[str, typer.Option(help="Values of pacing.max_lag, 0 among them.")]
Seeds = Annotated[int, typer.Option(min=1, help="Values of run.seed: 1 to so many.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="As of `openforge train`, for all runs.")]
Out = Annotated[Path, typer.Option(help="Folder for JSON and curves.")]
TINY, DOCS = Path("examples/tiny.toml"), Path("docs/lags")


@app.command("runs")
def repeat_runs(
    run_file: RunFile = TINY, lags: Lags = "0,1,2,4", seeds: Seeds = 3, overrides: Overrides = None, out: Out = DOCS
) -> None:
    """Train with all services at each max_lag with each seed, all values of a seed in turn, and compare with the
    synchronous run: what was learned, and how fast.

    In flight are `max_lag` + 1 batches, so that the bound is used. What ran before is not run again: a run of the same
    name that ended is read from its folder. Results are written after each seed.
    """
    asked = _asked(lags)
    runs: list[Measured] = []
    for seed in range(1, seeds + 1):
        runs += [_run(run_file, lag, seed, overrides or []) for lag in asked]
        rows = compared(runs, os.cpu_count() or 1)
        _write(out, "results.json", {"machine": machine(), "lags": rows, "runs": runs})
        draw(runs, out / "curves.svg")
        typer.echo("\n".join(table(rows)))


@app.command("exact")
def repeat_exactly(
    run_file: RunFile = TINY, lags: Lags = "0,1,2,4", seeds: Seeds = 8, overrides: Overrides = None, out: Out = DOCS
) -> None:
    """The same learner in one process, with every token exactly max_lag versions old: the worst that it may be.

    What the folder's exact.json holds of the same settings is not computed again. Results are written after each seed.
    """
    from openforge.cli.lags.exact import ENVIRONMENT
    from openforge.cli.lags.exact import learned as curve_of

    asked = _asked(lags)
    config = load(run_file, overrides)
    if config.run.steps < 1 or config.environment.name != ENVIRONMENT:
        raise typer.BadParameter(f"{run_file}: write run.steps of 1 or more, and environment.name = {ENVIRONMENT!r}")
    digest = _digest(config)
    made = {"machine": machine(), "run_file": str(run_file), "set": overrides or [], "digest": digest}
    found = _before(out / "exact.json", digest)
    for seed in range(1, seeds + 1):
        config = with_model(load(run_file, [*(overrides or []), f"run.seed={seed}"]))
        for lag in asked:
            found[seed, lag] = found.get((seed, lag)) or curve_of(config, lag)
        curves = [found[key] for key in sorted(found)]
        rows = learned([curve for curve in curves if curve.max_lag in asked and curve.seed <= seed])
        _write(out, "exact.json", {**made, "lags": rows, "curves": curves})
        draw(curves, out / "exact.svg")
        typer.echo("\n".join(learned_table(rows)))


class _Before(msgspec.Struct):
    """Of a result that was written before, what goes into the next one."""

    curves: list[Curve]
    digest: str = ""


def _before(path: Path, digest: str) -> dict[tuple[int, int], Curve]:
    """By seed and lag; nothing of other settings."""
    if not path.exists():
        return {}
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Before)
    except msgspec.MsgspecError as error:
        raise typer.BadParameter(f"{path} is no result of this command ({error}): name another --out") from None
    return {(curve.seed, curve.max_lag): curve for curve in found.curves if found.digest == digest}


def _digest(config: RunConfig) -> str:
    """The sha256, in hex, of all settings of the run file; the seed is each run's own."""
    return hashlib.sha256(msgspec.json.encode(config, order="sorted")).hexdigest()


def _asked(lags: str) -> list[int]:
    try:
        asked = [int(lag) for lag in lags.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--lags {lags} is no list of whole numbers: write for example 0,1,4") from None
    if min(asked) < 0 or len(set(asked)) < len(asked):
        raise typer.BadParameter(f"--lags {lags}: write each once, and none below 0")
    if 0 not in asked:
        raise typer.BadParameter(f"--lags {lags} lacks 0, the synchronous run that the others are compared with")
    return asked


def _run(run_file: Path, lag: int, seed: int, overrides: list[str]) -> Measured:
    """The run, from its folder where it ended before."""
    config = load(run_file, overrides)
    batch = config.pacing.groups_per_step * config.pacing.group_size
    name = f"{config.run.name}-lag{lag}-{seed}"
    note = Home(name).root / "measured.json"
    if note.exists():
        return msgspec.json.decode(note.read_bytes(), type=Measured)
    placed = (f"run.name={name}", f"run.seed={seed}", f"pacing.max_lag={lag}", f"pacing.in_flight={batch * (lag + 1)}")
    found = asyncio.run(measured(name, train(run_file, (*overrides, *placed))))
    note.write_bytes(msgspec.json.encode(found))
    return found


def _write(out: Path, name: str, result: dict[str, object]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / name).write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


if __name__ == "__main__":
    app()
