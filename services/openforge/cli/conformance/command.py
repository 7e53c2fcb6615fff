"""`openforge conformance`: installs harnesses, runs them, judges them, writes the table."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from openforge.cli.conformance.page import write_page
from openforge.cli.conformance.row import Row
from openforge.cli.home import Busy
from openforge.cli.reach import BAD_USE, fail
from openforge.cli.supervise import GaveUp
from openforge.harnesses import ALL, CannotInstall, Harness, UnknownHarness, find, install, is_installed
from openforge.models import get
from openforge.models.smollm2 import ModelUnavailable

MODEL = "tiny-long"
TIMEOUT_S = 300.0

Names = Annotated[list[str] | None, typer.Argument(help="Harnesses of the table; all where none is named.")]


def conformance(
    names: Names = None,
    fast: Annotated[bool, typer.Option("--fast", help="The subset of CI, with faults on the line.")] = False,
    faults: Annotated[bool, typer.Option("--faults", help="Break the line between harness and proxy too.")] = False,
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
    rows = _rows(harnesses, scenarios, out, timeout_s)
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
    from openforge.cli.conformance.run import Host

    broken = {harness.name: why for harness in harnesses if (why := _installed(harness))}
    tasks = [
        f"{harness.name}_{scenario}" for harness in harnesses if harness.name not in broken for scenario in scenarios
    ]
    rows = [
        _nothing(harness, f"not installed: {broken[harness.name]}") for harness in harnesses if harness.name in broken
    ]
    if tasks:
        runs = out.absolute().parent / "conformance"
        os.environ["OPENFORGE_RUNS"] = str(runs)
        typer.echo(f"{len(tasks)} jobs in one run, its logs in {runs}")
        try:
            host = Host(get(MODEL), runs, timeout_s=timeout_s)
            rows += asyncio.run(host.run(tasks, lambda row: typer.echo(_said(row))))
        except (ModelUnavailable, GaveUp, Busy) as error:
            fail(str(error))
    missing = [harness for harness in harnesses if harness.name not in {row.harness for row in rows}]
    rows += [_nothing(harness, "its job did not begin") for harness in missing]
    order = [harness.name for harness in harnesses]
    return sorted(rows, key=lambda row: (order.index(row.harness), row.scenario != "plain"))


def _nothing(harness: Harness, note: str) -> Row:
    return Row(harness=harness.name, version=harness.version, dialect=harness.dialect, note=note)


def _said(row: Row) -> str:
    off = "-" if row.logprob_max_diff is None else f"{row.logprob_max_diff:.1e}"
    figures = (
        f"{row.harness:<15} {row.scenario:<7} {'ok' if row.ok else 'NOT OK':<7}{row.calls:>3} calls"
        f"{row.branches:>3} branches{row.sequences:>3} sequences{row.prompt_tokens:>7} tokens"
        f"  delivered {row.delivered_fraction:.3f}  off by {off}  {row.agent_s:.1f} s"
    )
    return f"{figures}  {row.note}" if row.note else figures


def _write(out: Path, rows: Sequence[Row]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.with_suffix(".tmp")
    scratch.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")
    scratch.replace(out)
