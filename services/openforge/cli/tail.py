"""`openforge tail`: the streams as they come, as any consumer would see them."""

import re
import sys
import time
from datetime import datetime
from typing import Annotated, Any

import msgspec
import typer

from openforge.bus import CAUGHT_UP, KINDS, Bus, Told
from openforge.cli.lines import line
from openforge.cli.reach import BAD_USE, fail, run_on_bus
from openforge.protos import Fact

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def tail(
    run: Annotated[str, typer.Argument(help="The run's name; * is every run of the bus.")] = "*",
    kinds: Annotated[
        str, typer.Option("--kinds", "-k", help=f"Streams to follow, separated by commas: {', '.join(KINDS)}.")
    ] = ",".join(KINDS),
    facts: Annotated[str, typer.Option("--fact", "-f", help="Only these facts, e.g. EpisodeEnded,EpisodeFailed.")] = "",
    episode: Annotated[
        str, typer.Option("--episode", "-e", help="Only this episode, or the episodes of this group.")
    ] = "",
    since: Annotated[
        str, typer.Option("--since", help="Only what was told since: 30s, 10m, 2h, 1d or a date and time.")
    ] = "",
    new: Annotated[bool, typer.Option("--new", help="Only what is told from now on.")] = False,
    once: Annotated[bool, typer.Option("--once", help="End when everything that was told is shown.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, bytes as base64.")] = False,
) -> None:
    """Show facts in the order in which they were told, and go on as they come.

    Nothing is acknowledged or changed: any number of readers may follow. Ctrl-C ends it.
    """
    wanted = Wanted(
        kinds=_kinds(kinds),
        facts=_facts(facts),
        episode=episode,
        since=time.time() if new else _since(since),
    )

    async def follow(bus: Bus) -> None:
        async for told in bus.follow(wanted.kinds, run=run, until_now=once):
            if told is not CAUGHT_UP and wanted.takes(told):
                typer.echo(_json(told) if as_json else line(told, with_run=run == "*"))

    try:
        run_on_bus(None if run == "*" else run, follow)
    except BrokenPipeError:
        sys.stderr.close()  # `| head` has seen enough


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which facts to show."""

    kinds: tuple[str, ...]
    facts: frozenset[str]
    episode: str
    since: float

    def takes(self, told: Told[Fact]) -> bool:
        if self.facts and type(told.fact).__name__ not in self.facts:
            return False
        if told.at < self.since:
            return False
        if not self.episode:
            return True
        names = (getattr(told.fact, "episode", ""), getattr(told.fact, "group", ""))
        return any(name == self.episode or name.startswith(f"{self.episode}-") for name in names if name)


def _json(told: Told[Fact]) -> str:
    said: dict[str, Any] = {"at": told.at, "kind": told.kind, "subject": told.subject, "sequence": told.sequence}
    return msgspec.json.encode(said | {"fact": told.fact}).decode()


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(kind.strip() for kind in text.split(",") if kind.strip())
    for kind in kinds:
        if kind not in KINDS:
            fail(f"--kinds {text}: there is no stream {kind!r}, choose from {', '.join(KINDS)}", BAD_USE)
    return kinds or KINDS


def _facts(text: str) -> frozenset[str]:
    names = frozenset(name.strip() for name in text.split(",") if name.strip())
    for name in names - Fact.registry.keys():
        fail(f"--fact {text}: there is no fact {name!r}, choose from {', '.join(sorted(Fact.registry))}", BAD_USE)
    return names


def _since(text: str) -> float:
    if not text:
        return 0.0
    if ago := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
        return time.time() - float(ago[1]) * _UNITS_S[ago[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        fail(f"--since {text}: write 30s, 10m, 2h, 1d, or a date and time such as 2026-01-31T12:00", BAD_USE)
