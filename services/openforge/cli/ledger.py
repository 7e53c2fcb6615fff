"""`openforge ledger`: what became of everything that a run asked for."""

from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer

from openforge.bus import Bus
from openforge.cli.reach import BAD_USE, fail, run_on_bus
from openforge.protos import RunSubmitted
from openforge.runs import Account, Ledger, Tally, UnknownRun, ledger_of

OPEN = 1


def ledger(
    run: Annotated[str, typer.Argument(help="The run's name.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object and nothing else.")] = False,
) -> None:
    """Requested = trained + retired + failed + in flight, in episodes and sampled tokens.

    Folded from the run's streams, over all its restarts, with every rule of its lineage. Exit codes: 0 it
    closes, 1 it does not (or the bus cannot be reached), 2 nobody knows the run.
    """
    found = run_on_bus(run, lambda bus: _known_ledger(bus, run))
    if found is None:
        fail(str(UnknownRun(run)), BAD_USE)
    if as_json:
        typer.echo(msgspec.json.encode(found).decode())
    else:
        typer.echo("\n".join(lines(found)))
    if not found.closes:
        raise typer.Exit(OPEN)


async def _known_ledger(bus: Bus, run: str) -> Ledger | None:
    return await ledger_of(bus, run) if await bus.count(RunSubmitted, run) else None


def lines(ledger: Ledger) -> Iterator[str]:
    """The ledger as a person reads it."""
    yield f"{'run ' + ledger.run:<28}{'episodes':>10}{'tokens':>12}"
    yield from _account("training", "trained", ledger.train)
    if ledger.eval.requested.episodes:
        yield from _account("held out", "scored", ledger.eval)
    yield f"{ledger.versions} versions, largest lag {ledger.lag_max} of {ledger.max_lag}"
    yield "closes" if ledger.closes else f"DOES NOT CLOSE: {len(ledger.differences)} differences"
    yield from (f"  - {difference}" for difference in ledger.differences)


def _account(title: str, done: str, account: Account) -> Iterator[str]:
    yield _row(f"{title}: requested", account.requested)
    yield _row(f"  {done}", account.done)
    for reason, tally in sorted(account.retired.items()):
        yield _row(f"  retired, {reason}", tally)
    yield _row("  failed", account.failed)
    yield _row("  in flight", account.in_flight)
    for cause, tally in sorted(account.failed_attempts.items()):
        yield f"    attempts failed, {cause}: {tally.episodes} with {tally.tokens} tokens"
    for why, tokens in sorted(account.dropped_tokens.items()):
        yield f"    sampled but not trained, {why}: {tokens} tokens"
    ends = ", ".join(f"{reason} {times}" for reason, times in sorted(account.ended.items(), key=lambda it: -it[1]))
    yield f"    {account.attempts} attempts; ended: {ends or 'none'}"


def _row(name: str, tally: Tally) -> str:
    return f"{name:<28}{tally.episodes:>10}{tally.tokens:>12}"
