"""`openforge export` and `openforge import`: a run as a folder, and a folder as a run."""

import os
from pathlib import Path
from typing import Annotated

import typer

from openforge.bus import Bus
from openforge.cli.home import Home, Unusable
from openforge.cli.reach import BAD_USE, fail, run_on_bus
from openforge.protos import BadKey, RunSubmitted, token
from openforge.runs import UnknownRun

MISSING = "pyarrow is not installed: pip install 'openforge[export]'"


def export(
    run: Annotated[str, typer.Argument(help="The run's name.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="A folder that does not exist yet.", show_default=False)],
) -> None:
    """Write a run to parquet: episodes, turns and sequences as a Hugging Face dataset, and all its facts.

    `datasets.load_dataset(OUT, "sequences")` reads the tables, `openforge import OUT` the facts. What lies only in
    blobs (the files that agents left) is not written.
    """
    try:
        from openforge.cli import archive
    except ImportError:
        fail(MISSING)

    async def write(bus: Bus) -> archive.Counts | None:
        return await archive.export(bus, run, out) if await bus.count(RunSubmitted, run) else None

    try:
        counts = run_on_bus(run, write)
    except archive.NotEmpty as error:
        fail(str(error), BAD_USE)
    if counts is None:
        fail(str(UnknownRun(run)), BAD_USE)
    typer.echo(
        f"{out}: {counts.facts} facts, {counts.episodes} episodes, {counts.turns} turns, {counts.sequences} sequences"
    )
    if counts.unreadable:
        typer.echo(f"{counts.unreadable} facts of another version are in facts/ and in no table", err=True)


def import_(
    folder: Annotated[Path, typer.Argument(help="What `openforge export` wrote.", show_default=False)],
    untrained: Annotated[
        bool,
        typer.Option("--untrained", help="Without what learner and engine told: feeds a learner that trains it anew."),
    ] = False,
) -> None:
    """Put a recorded run on the bus at OPENFORGE_NATS_URL, or into a run's folder of its own here.

    The facts are told byte for byte as they were. What is there already is fine if it is the same; a key that holds
    something else is an error: then choose another bus, or another OPENFORGE_RUNS. With --untrained it goes on for as
    long as the learner on that bus takes: no verdict is told before the version that sampled it is trained.
    """
    try:
        from openforge.cli import archive
    except ImportError:
        fail(MISSING)

    async def tell(bus: Bus) -> int:
        await bus.set_up()
        if untrained:
            return await archive.tell_as_it_is_trained(bus, folder, run)
        return await archive.tell_all(bus, folder)

    try:
        run = archive.run_of(folder)
        if not os.environ.get("OPENFORGE_NATS_URL"):
            Home(token("run", run)).make()
        told = run_on_bus(run, tell)
    except (archive.BadArchive, BadKey) as error:
        fail(str(error), BAD_USE)
    except Unusable as error:
        fail(str(error))
    typer.echo(f"run {run}: {told} facts are on the bus; `openforge ledger {run}` shows what became of it")
