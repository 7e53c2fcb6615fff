"""Kills processes of a run at work, and looks whether anything was lost.

Promises: only processes of the run that it started are killed; the result says which, when, and what the
ledger said in the end.
"""

import asyncio
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from openforge.cli.children import with_us
from openforge.cli.home import Home
from openforge.cli.local import SERVICES as SERVICES
from openforge.cli.supervise import Policy

ENV_HOST = "env_host"
FOLLOWER = "learner_rank_1"
TARGETS = (*SERVICES, FOLLOWER, ENV_HOST, "nats")
TWO_RANKS = "learner.world_size=2"
"""The override that gives a run the target `FOLLOWER`."""


_PATIENCE = Policy()
_QUICK_S = _PATIENCE.quick_s + _PATIENCE.longest_pause_s + 1.0
_MOST_QUICK = _PATIENCE.quick_deaths - 3


class RunEnded(Exception):
    """The run ended before it could be disturbed."""


class Pace:
    """Of the kills of one process: its supervisor takes too many deaths in a row, each soon after a start, for a fault,
    and not all of these are to be ours."""

    def __init__(self) -> None:
        self._last = -_QUICK_S
        self._quick = 0

    def may(self) -> bool:
        return self._quick < _MOST_QUICK or time.monotonic() - self._last > _QUICK_S

    def note(self) -> None:
        now = time.monotonic()
        self._quick = self._quick + 1 if now - self._last < _QUICK_S else 0
        self._last = now


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    target: str
    pid: int
    after_s: float
    version: int


class Disturbed:
    """A run under `openforge train`, whose processes can be killed by name."""

    def __init__(self, home: Home, process: asyncio.subprocess.Process) -> None:
        self.home = home
        self.process = process
        self.kills: list[Kill] = []
        self._born = time.monotonic()

    async def kill(self, target: str, *, wait_s: float = 60.0) -> Kill:
        """SIGKILL `target` as soon as it runs; raises `RunEnded`."""
        pid = await self._pid(target, wait_s)
        os.kill(pid, signal.SIGKILL)
        return self.note(target, pid)

    def note(self, target: str, pid: int) -> Kill:
        """That process `pid` was killed."""
        kill = Kill(target=target, pid=pid, after_s=time.monotonic() - self._born, version=self.version())
        self.kills.append(kill)
        return kill

    async def version_reached(self, version: int, *, wait_s: float) -> None:
        """Returns once batch `version` is committed; raises `RunEnded` or `TimeoutError`."""
        async with asyncio.timeout(wait_s):
            while self.version() < version:
                self._still_running()
                await asyncio.sleep(0.1)

    def version(self) -> int:
        """The newest weights on disk; -1 before there are any."""
        versions = [int(folder.name[1:].split("-")[0]) for folder in (self.home.root / "weights").glob("v*-*")]
        return max(versions, default=-1)

    async def _pid(self, target: str, wait_s: float) -> int:
        async with asyncio.timeout(wait_s):
            while (pid := self._look_up(target)) is None:
                self._still_running()
                await asyncio.sleep(0.05)
        return pid

    def _look_up(self, target: str) -> int | None:
        if target == ENV_HOST:
            manager = self._look_up("sandbox_manager")
            return None if manager is None else _env_host_of(manager)
        if target == FOLLOWER:
            learner = self._look_up("learner")
            return None if learner is None else next(iter(children_of(learner)), None)
        try:
            process = msgspec.json.decode((self.home.root / "processes.json").read_bytes()).get(target, {})
        except FileNotFoundError:
            return None
        pid = process.get("pid")
        return pid if pid and process["state"] in ("running", "ready") and _alive(pid) else None

    def _still_running(self) -> None:
        if self.process.returncode is not None:
            raise RunEnded(f"the run ended with exit code {self.process.returncode} before it could be disturbed")


@asynccontextmanager
async def disturbed(
    run_file: Path, runs: Path, run: str, overrides: Sequence[str] = (), settings: Mapping[str, str] | None = None
) -> AsyncIterator[Disturbed]:
    """`openforge train` on `run_file` for the time of the block; ended if the block leaves it running.

    `settings` are environment variables of its services.
    """
    home = Home(run, runs)
    home.root.mkdir(parents=True, exist_ok=True)
    sets = [argument for override in (f"run.name={run}", *overrides) for argument in ("--set", override)]
    with (home.root / "train.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "openforge.cli", "train", str(run_file), *sets),
            env=dict(os.environ) | dict(settings or {}) | {"OPENFORGE_RUNS": str(runs)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=with_us(),
        )
    try:
        yield Disturbed(home, process)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            await process.wait()


def ledger_of_home(home: Home) -> tuple[int, dict[str, Any]]:
    """What `openforge ledger RUN --json` says: its exit code and its object."""
    done = subprocess.run(
        (sys.executable, "-m", "openforge.cli", "ledger", home.run, "--json"),
        env=dict(os.environ) | {"OPENFORGE_RUNS": str(home.root.parent)},
        capture_output=True,
        check=False,
    )
    if not done.stdout:
        raise RuntimeError(f"openforge ledger said nothing: {done.stderr.decode(errors='replace')[-2000:]}")
    return done.returncode, msgspec.json.decode(done.stdout)


def _env_host_of(manager: int) -> int | None:
    """The manager's first env host, which lives in a sandbox: some generations below the manager."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            named = b"openforge.sandbox_manager.env_host" in entry.read_bytes().split(b"\0")
            if named and manager in _ancestors(int(entry.parent.name)):
                return int(entry.parent.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return None


def children_of(pid: int) -> list[int]:
    """The processes that `pid` started; none where it is gone."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, listed.read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def _ancestors(pid: int) -> list[int]:
    found: list[int] = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        found.append(pid)
    return found


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def soak(run_file: Path, runs: Path, kills: int, seed: int, pause_s: tuple[float, float]) -> dict[str, Any]:
    """`kills` random kills over as many runs as that takes; each run must end well and its ledger close."""
    rng = random.Random(seed)
    ended: list[dict[str, Any]] = []
    done: list[Kill] = []
    while len(done) < kills:
        name = f"soak-{seed}-{len(ended)}"
        pace = {target: Pace() for target in TARGETS}
        pace[FOLLOWER] = pace["learner"]  # which ends with it
        async with disturbed(run_file, runs, name, (f"run.seed={seed + len(ended)}", TWO_RANKS)) as run:
            try:
                await run.version_reached(0, wait_s=180)
                while len(done) + len(run.kills) < kills:
                    await asyncio.sleep(rng.uniform(*pause_s))
                    if not (targets := [target for target in TARGETS if pace[target].may()]):
                        continue
                    kill = await run.kill(rng.choice(targets))
                    pace[kill.target].note()
                    typer.echo(f"{name} {kill.after_s:7.1f} s  v{kill.version}  killed {kill.target}", err=True)
            except RunEnded:
                pass
            exit_code = await run.process.wait()
        ledger_exit, ledger = ledger_of_home(run.home)
        done.extend(run.kills)
        ended.append(
            {
                "run": name,
                "exit_code": exit_code,
                "ledger_closes": ledger_exit == 0,
                "summary": msgspec.json.decode(run.home.summary.read_bytes()) if run.home.summary.exists() else None,
                "ledger": ledger,
                "kills": msgspec.to_builtins(run.kills),
            }
        )
        if not run.kills:
            raise RuntimeError(f"{name} ended before anything was killed: {run.home.root / 'train.log'}")
    return {
        "kills": len(done),
        "by_target": {target: sum(kill.target == target for kill in done) for target in TARGETS},
        "all_ended_well": all(run["exit_code"] == 0 and run["ledger_closes"] for run in ended),
        "commit": commit(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "runs": ended,
    }


def commit() -> str:
    done = subprocess.run(("git", "rev-parse", "HEAD"), capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main(
    run_file: Annotated[Path, typer.Option(help="The run to disturb.")] = Path("examples/tiny.toml"),
    runs: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs"),
    kills: Annotated[int, typer.Option(min=1)] = 50,
    seed: int = 1,
    out: Annotated[Path | None, typer.Option(help="Write the JSON here too.")] = None,
) -> None:
    """Kill random processes of a run at work; exit 0 only if every run ended well and every ledger closes."""
    result = asyncio.run(soak(run_file, runs.resolve(), kills, seed, (1.0, 4.0)))
    text = msgspec.json.format(msgspec.json.encode(result), indent=1).decode()
    if out is not None:
        out.write_text(text + "\n")
    typer.echo(text)
    raise typer.Exit(0 if result["all_ended_well"] else 1)


if __name__ == "__main__":
    typer.run(main)
