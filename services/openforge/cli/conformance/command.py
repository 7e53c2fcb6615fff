"""`openforge conformance`: installs harnesses, runs them, judges them, writes the table."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from openforge.cli.conformance.page import write_page
from openforge.cli.conformance.row import Row
from openforge.cli.home import Unusable
from openforge.cli.reach import BAD_USE, fail
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

Names = Annotated[list[str] | None, typer.Argument(help="Harnesses of the table; all where none is named.")]


def conformance(
    names: Names = None,
    fast: Annotated[bool, typer.Option("--fast", help="The subset of CI, with faults on the line.")] = False,
    faults: Annotated[bool, typer.Option("--faults", help="Break the line between harness and proxy too.")] = False,
    real: Annotated[
        bool, typer.Option("--real", help="SmolLM2 says what it likes: pi, mini-swe-agent, a small script.")
    ] = False,
    show: Annotated[bool, typer.Option("--list", help="The table of harnesses, and what is installed.")] = False,
    install_only: Annotated[bool, typer.Option("--install", help="Install and run nothing.")] = False,
    out: Annotated[Path, typer.Option(help="The figures, one object a line of the table.")] = Path(
        "build/conformance.json"
    ),
    docs: Annotated[Path | None, typer.Option(help="Write the table into this page too.")] = None,
    timeout_s: Annotated[float, typer.Option(help="What one harness may take for the job.")] = TIMEOUT_S,
) -> None:
    """Run real harnesses, unmodified, through the real services and check every token.

    Each is installed if need be (all together: 5 GB) and does a small job whose replies are scripted, while the
    log-probs are true. Exit codes: 0 all are ok, 1 some are not, 2 there is no such harness.
    """
    harnesses = _chosen(names or [], fast)
    if show:
        typer.echo("\n".join(map(_listed, harnesses)))
        return
    if install_only:
        broken = [why for harness in harnesses if (why := _installed(harness))]
        raise typer.Exit(1 if broken else 0)
    scenarios = ("plain", "faults") if faults or fast else ("plain",)
    try:
        rows = _real_rows(out, timeout_s) if real else _rows(harnesses, scenarios, out, timeout_s)
    except (ModelUnavailable, GaveUp, Unusable) as error:
        fail(str(error))
    _write(out, rows)
    if docs is not None:
        write_page(docs, rows)
    bad = [f"{row.harness} ({row.scenario})" for row in rows if not row.ok]
    typer.echo(f"{len(rows) - len(bad)} of {len(rows)} ok, figures in {out}")
    if bad:
        fail(f"not ok: {', '.join(bad)}")


def _chosen(names: Sequence[str], fast: bool) -> list[Harness]:
    try:
        named = [find(name) for name in names] or list(ALL)
    except UnknownHarness as error:
        fail(str(error), BAD_USE)
    return [harness for harness in named if harness.fast or not fast]


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


def _rows(harnesses: Sequence[Harness], scenarios: Sequence[str], out: Path, timeout_s: float) -> list[Row]:
    """A line for each harness and scenario, whatever became of it."""
    jobs = [(harness, scenario) for harness in harnesses for scenario in (*scenarios, *harness.more)]
    broken = {harness.name: why for harness in harnesses if (why := _installed(harness))}
    tasks = [f"{harness.name}_{scenario}" for harness, scenario in jobs if harness.name not in broken]
    rows: list[Row] = []
    if tasks:
        rows = asyncio.run(_host(MODEL, out).scripted(tasks, timeout_s=timeout_s))
    told = {(row.harness, row.scenario) for row in rows}
    rows += [
        _nothing(harness, scenario, broken.get(harness.name, "its job did not begin"))
        for harness, scenario in jobs
        if (harness.name, scenario) not in told
    ]
    order = [(harness.name, scenario) for harness, scenario in jobs]
    return sorted(rows, key=lambda row: order.index((row.harness, row.scenario)))


def _real_rows(out: Path, timeout_s: float) -> list[Row]:
    """A real model does what it likes in them: nothing may crash, and what is recorded must be true."""
    for name in REAL:
        if why := _installed(find(name)):
            fail(why)
    return asyncio.run(_host(REAL_MODEL, out).real([f"{name}_real" for name in REAL], timeout_s=timeout_s))


def _host(model: str, out: Path) -> "Host":
    from openforge.cli.conformance.run import Host

    os.environ["OPENFORGE_RUNS"] = str(_runs(out))
    return Host(get(model), _runs(out), typer.echo)


def _runs(out: Path) -> Path:
    return out.absolute().parent / "conformance"


def _nothing(harness: Harness, scenario: str, note: str) -> Row:
    return Row(harness=harness.name, version=harness.version, dialect=harness.dialect, scenario=scenario, note=note)


def _write(out: Path, rows: Sequence[Row]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.with_suffix(".tmp")
    scratch.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")
    scratch.replace(out)
