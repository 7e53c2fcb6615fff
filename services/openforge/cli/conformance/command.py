"""`openforge conformance`: installs harnesses, runs them, judges them, writes the table."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from openforge.cli.conformance.apart import Interrupted
from openforge.cli.conformance.figures import Figures
from openforge.cli.conformance.page import said, write_page
from openforge.cli.conformance.row import Row
from openforge.cli.reach import BAD_USE, NO_BUS, fail
from openforge.cli.supervise import GaveUp
from openforge.harnesses import ALL, CannotInstall, Harness, UnknownHarness, find, install, is_installed
from openforge.models import get
from openforge.models.smollm2 import ModelUnavailable

if TYPE_CHECKING:
    from openforge.cli.conformance.run import Host

MODEL = "tiny-long"
REAL_MODEL = "smollm2-135m"
REAL = ("pi", "mini-swe-agent")
TIMEOUT_S = 300.0
INTERRUPTED = 130

Names = Annotated[list[str] | None, typer.Argument(help="Harnesses of the table; all where none is named.")]


def conformance(
    names: Names = None,
    fast: Annotated[bool, typer.Option("--fast", help="The subset of CI, with faults on the line.")] = False,
    faults: Annotated[bool, typer.Option("--faults", help="Break the line between harness and proxy too.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="A scenario; those that are not named are left out.")] = None,
    judge: Annotated[
        bool, typer.Option("--judge", help="Judge what was hosted last, however that ended, and host nothing.")
    ] = False,
    real: Annotated[
        bool, typer.Option("--real", help="SmolLM2 says what it likes: pi, mini-swe-agent, a small script.")
    ] = False,
    show: Annotated[bool, typer.Option("--list", help="The table of harnesses, and what is installed.")] = False,
    install_only: Annotated[bool, typer.Option("--install", help="Install and run nothing.")] = False,
    out: Annotated[Path, typer.Option(help="The figures, one object a line of the table.")] = Path(
        "build/conformance.json"
    ),
    docs: Annotated[Path | None, typer.Option(help="Write the table into this page too; for all harnesses.")] = None,
    timeout_s: Annotated[float, typer.Option(help="What one harness may take for the job.")] = TIMEOUT_S,
) -> None:
    """Run real harnesses, unmodified, through the real services and check every token.

    Each is installed if need be (all together: 5 GB) and does a small job whose replies are scripted, while the
    log-probs are true. The figures are written after each job that was judged; Ctrl-C ends everything and keeps them.
    Exit codes: 0 all are ok, 1 some are not, 2 there is no such harness or scenario, 130 interrupted.
    """
    harnesses = _chosen(names or [], fast)
    if docs is not None and (names or fast or only or real):
        fail("--docs writes the whole table: leave out names, --fast, --only and --real", BAD_USE)
    if real and (judge or only):
        fail("--real hosts and judges its own jobs: leave out --judge and --only", BAD_USE)
    if show:
        typer.echo("\n".join(map(_listed, harnesses)))
        return
    jobs = [] if real else _jobs(harnesses, faults or fast, only or [])
    figures = Figures(out, [(harness.name, scenario) for harness, scenario in jobs])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # where no event loop listens, as Ctrl-C
    try:
        if install_only:
            broken = [why for harness in harnesses if (why := _installed(harness))]
            raise typer.Exit(1 if broken else 0)
        if real:
            _real_rows(figures, timeout_s)
        else:
            _rows(figures, jobs, timeout_s, judge=judge)
    except Interrupted:
        _leave(figures)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except (ModelUnavailable, GaveUp, *NO_BUS) as error:
        fail(str(error))
    if docs is not None:
        write_page(docs, figures.rows)
    bad = [f"{row.harness} ({row.scenario})" for row in figures.rows if not row.ok]
    typer.echo(f"{len(figures.rows) - len(bad)} of {len(figures.rows)} ok, figures in {out}")
    if bad:
        fail(f"not ok: {', '.join(bad)}")


def _leave(figures: Figures) -> NoReturn:
    """At once: a forward pass may still be at work in a thread, and nothing else of ours is."""
    where = f", figures in {figures.out}" if figures.rows else ""
    typer.echo(
        f"interrupted: {len(figures.rows)} jobs have a line{where}; --judge goes on with what was hosted", err=True
    )
    sys.stdout.flush()
    os._exit(INTERRUPTED)


def _chosen(names: Sequence[str], fast: bool) -> list[Harness]:
    try:
        named = [find(name) for name in names] or list(ALL)
    except UnknownHarness as error:
        fail(str(error), BAD_USE)
    return [harness for harness in named if harness.fast or not fast]


def _jobs(harnesses: Sequence[Harness], faults: bool, only: Sequence[str]) -> list[tuple[Harness, str]]:
    """Each harness in each of its scenarios; with faults on the line only where that is asked for."""
    jobs = [(harness, scenario) for harness in harnesses for scenario in ("plain", "faults", *harness.more)]
    if unknown := set(only) - {scenario for _, scenario in jobs}:
        fail(f"there is no scenario {', '.join(sorted(unknown))} for what was chosen", BAD_USE)
    chosen = set(only) or {scenario for _, scenario in jobs} - (set() if faults else {"faults"})
    return [(harness, scenario) for harness, scenario in jobs if scenario in chosen]


def _listed(harness: Harness) -> str:
    there = "installed" if is_installed(harness) else "not installed"
    return f"{harness.name:<16}{harness.version:<12}{harness.dialect:<11}{'fast ' if harness.fast else '':<6}{there}"


def _installed(harness: Harness) -> str:
    """Why it could not be installed; empty where it is."""
    try:
        install(harness, typer.echo)
    except CannotInstall as error:
        typer.echo(f"{harness.name}: {error}", err=True)
        return str(error)
    return ""


def _rows(figures: Figures, jobs: Sequence[tuple[Harness, str]], timeout_s: float, *, judge: bool) -> None:
    """A line for each job, whatever became of it."""
    harnesses = {} if judge else {harness.name: harness for harness, _ in jobs}
    broken = {name: why for name, harness in harnesses.items() if (why := _installed(harness))}
    for harness, scenario in jobs:
        if harness.name in broken:
            figures.add(_nothing(harness, scenario, broken[harness.name]))
    tasks = [f"{harness.name}_{scenario}" for harness, scenario in jobs if harness.name not in broken]
    if judge:
        asyncio.run(_host(MODEL, figures).again(tasks))
    elif tasks:
        asyncio.run(_host(MODEL, figures).scripted(tasks, timeout_s=timeout_s))
    told = {(row.harness, row.scenario) for row in figures.rows}
    for harness, scenario in jobs:
        if (harness.name, scenario) not in told:
            figures.add(_nothing(harness, scenario, "its job did not begin"))


def _real_rows(figures: Figures, timeout_s: float) -> None:
    """A real model does what it likes in them: nothing may crash, and what is recorded must be true."""
    for name in REAL:
        if why := _installed(find(name)):
            fail(why)
    asyncio.run(_host(REAL_MODEL, figures).real([f"{name}_real" for name in REAL], timeout_s=timeout_s))


def _host(model: str, figures: Figures) -> "Host":
    from openforge.cli.conformance.run import Host

    def show(row: Row) -> None:
        typer.echo(said(row))
        figures.add(row)

    runs = figures.out.absolute().parent / "conformance"
    os.environ["OPENFORGE_RUNS"] = str(runs)
    return Host(get(model), runs, typer.echo, show)


def _nothing(harness: Harness, scenario: str, note: str) -> Row:
    return Row(harness=harness.name, version=harness.version, dialect=harness.dialect, scenario=scenario, note=note)
