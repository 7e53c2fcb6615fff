"""Attacks by name, where they run, and the list of what came of them."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from openforge.sandbox.contract import ExecResult


class Stakes(msgspec.Struct, kw_only=True):
    """What there is to win on the host. `seen` is what its servers heard, from whomever; `memory` is a folder of files
    that lie in memory, as those of a sandbox do.
    """

    secret: str
    folder: Path
    file: Path
    handle: str
    socket: Path
    abstract: str
    port: int
    datagrams: int
    group: Path
    memory: Path
    addresses: Sequence[str]
    seen: list[bytes] = []


class Place(Protocol):
    """Where an agent works, and what the owner of that place does with what it left.

    `targets` says where things of a kind are to be looked for here.
    """

    name: str
    targets: Mapping[str, Sequence[str]]
    how: str

    async def run(self, argv: Sequence[str], *, timeout_s: float = 30.0) -> ExecResult: ...

    async def alive(self) -> bool: ...

    async def neighbour(self) -> "Place":
        """Another agent of the same owner."""
        ...

    async def end_work(self) -> None:
        """The owner ends what the agent runs."""
        ...

    async def fetch(self, name: str) -> bytes:
        """The owner reads one file of the work; raises what it raises, also where it takes long."""
        ...

    async def collect(self) -> bytes:
        """The owner takes all of the work as a tar."""
        ...

    async def unpack(self, tar: bytes) -> None:
        """The owner unpacks an archive in the work."""
        ...

    async def names(self) -> list[str]:
        """The owner lists the work."""
        ...


Run = Callable[[Any, Stakes], Awaitable[str]]


class Attack(msgspec.Struct, frozen=True, kw_only=True):
    """`run(place, stakes)` returns what was won, nothing where it was stopped. `guard` is what stops it: the `kernel`
    as the driver has set it up, or the code by which the owner takes what an agent left. `spec` is what the sandbox
    must be besides; its binds show folders of the stakes.
    """

    name: str
    run: Run
    guard: Literal["kernel", "owner"] = "kernel"
    spec: dict[str, Any] = {}


def attack(name: str, guard: Literal["kernel", "owner"] = "kernel", **spec: Any) -> Callable[[Run], Attack]:
    return lambda run: Attack(name=name, run=run, guard=guard, spec=spec)


async def python(place: Place, script: str, *arguments: str, timeout_s: float = 30.0) -> str:
    """What the script printed after `WON`, nothing where it did not come to that."""
    argv = ["/usr/bin/python3", "-I", "-c", script, *arguments]
    return won(await place.run(argv, timeout_s=timeout_s))


async def shell(place: Place, line: str, *, timeout_s: float = 30.0) -> str:
    return won(await place.run(["/bin/bash", "-c", line], timeout_s=timeout_s))


def won(result: ExecResult) -> str:
    said = result.stdout.decode(errors="replace")
    return said[said.index("WON") :].strip()[:500] if "WON" in said else ""


def told(result: ExecResult) -> str:
    """The last word of a command that won nothing."""
    if result.timed_out:
        return "ended when its time was over"
    if result.out_of_memory:
        return "ended by the memory limit"
    if result.truncated:
        return f"{len(result.stdout) + len(result.stderr)} bytes of its output were kept"
    said = (result.stderr.strip() or result.stdout.strip()).decode(errors="replace").splitlines()
    return f"exit code {result.exit_code}" + (f": {said[-1][:160]}" if said else "")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    attack: str
    driver: str
    blocked: bool
    how: str


class Outcomes:
    """The rows of `redteam.json`, written when all is done."""

    def __init__(self) -> None:
        self.rows: list[Outcome] = []

    def add(self, attack: str, driver: str, loot: str, how: str) -> None:
        self.rows.append(Outcome(attack=attack, driver=driver, blocked=not loot, how=loot or how))

    def write(self, place: Path) -> None:
        place.parent.mkdir(exist_ok=True)
        rows = sorted(self.rows, key=lambda row: (row.attack, row.driver))
        place.write_text(json.dumps([msgspec.to_builtins(row) for row in rows], indent=1) + "\n")
