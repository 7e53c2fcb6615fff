"""`openforge status`: what is known of a run, or of all runs of this folder."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from openforge.bus import CAUGHT_UP, Bus
from openforge.cli.home import Home
from openforge.cli.reach import BAD_USE, fail, run_on_bus
from openforge.protos import DeadLetter
from openforge.runs import Progress
from openforge.runs.progress import FOLDED


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How a run stands, for people and for `--json`."""

    run: str
    phase: str
    reason: str | None
    detail: str
    finished: bool
    steps: int
    steps_wanted: int
    trained: int
    published: int | None
    served: int | None
    in_flight: int
    in_flight_allowed: int
    groups_open: int
    episodes: int
    verified: int
    reward_last: float | None
    lag_max: int
    max_lag: int
    heldout: dict[int, float]
    retired: dict[str, int]
    failed_attempts: dict[str, int]
    last_movement: str
    last_movement_s: float
    stuck: str | None
    dead_letters: int
    processes: dict[str, Any]


def status(
    run: Annotated[
        str | None, typer.Argument(help="The run's name; all runs of this folder where it is left out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object and nothing else.")] = False,
) -> None:
    """How a run stands: steps, versions, what is in flight, what was lost and why, and its processes."""
    if run is None:
        _list(as_json)
        return
    found = run_on_bus(run, lambda bus: standing_of(bus, run))
    if found.phase == "absent":
        fail(f"run {run!r} was never submitted here: start it with `openforge train`, or check the name", BAD_USE)
    typer.echo(msgspec.json.encode(found).decode() if as_json else "\n".join(lines(found)))


async def standing_of(bus: Bus, run: str) -> Standing:
    progress = Progress()
    async for told in bus.follow(FOLDED, run=run, until_now=True):
        if told is not CAUGHT_UP:
            progress.apply(told.fact, told.at)
    letters = [letter for letter in await bus.dead_letters() if f".{run}." in letter.subject]
    return _standing(run, progress, letters)


def _standing(run: str, progress: Progress, letters: list[DeadLetter]) -> Standing:
    config, now, state = progress.config, time.time(), progress.state
    return Standing(
        run=run,
        phase=state.phase,
        reason=state.reason,
        detail=state.detail,
        finished=config is not None and progress.finished(config),
        steps=len(progress.steps),
        steps_wanted=config.run.steps if config else 0,
        trained=progress.trained,
        published=progress.published,
        served=progress.served,
        in_flight=progress.in_flight,
        in_flight_allowed=progress.in_flight_allowed,
        groups_open=progress.groups_open,
        episodes=progress.episodes_requested,
        verified=progress.episodes_verified,
        reward_last=progress.steps[-1].reward_mean if progress.steps else None,
        lag_max=progress.lag_max,
        max_lag=config.pacing.max_lag if config else 0,
        heldout={version: evaluation.success for version, evaluation in sorted(progress.evaluations.items())},
        retired={str(reason): times for reason, times in progress.retired.items()},
        failed_attempts={str(reason): times for reason, times in progress.failed_attempts.items()},
        last_movement=progress.last_movement,
        last_movement_s=max(0.0, now - progress.last_movement_at),
        stuck=progress.stuck(config, now) if config else None,
        dead_letters=len(letters),
        processes=_processes(Home(run)),
    )


def lines(standing: Standing) -> Iterator[str]:
    why = f" ({standing.reason}{': ' + standing.detail if standing.detail else ''})" if standing.reason else ""
    yield f"run {standing.run}: {'finished, ' if standing.finished else ''}{standing.phase}{why}"
    reward = "" if standing.reward_last is None else f", reward {standing.reward_last:.3f}"
    yield (
        f"  steps {standing.steps} of {standing.steps_wanted}{reward}, version {standing.trained} trained, "
        f"{standing.published} published, {standing.served} served"
    )
    yield (
        f"  {standing.in_flight} attempts in flight of at most {standing.in_flight_allowed} "
        f"in {standing.groups_open} open groups, "
        f"{standing.verified} of {standing.episodes} episodes verified, "
        f"largest lag {standing.lag_max} of {standing.max_lag}"
    )
    for version, success in standing.heldout.items():
        yield f"  held out at version {version}: {success:.3f}"
    lost = {**standing.retired, **{f"attempts {reason}": n for reason, n in standing.failed_attempts.items()}}
    yield f"  lost: {', '.join(f'{reason} {times}' for reason, times in lost.items()) or 'nothing'}"
    yield f"  last movement {standing.last_movement_s:.0f} s ago: {standing.last_movement}"
    if standing.stuck:
        yield f"  STUCK: {standing.stuck}"
    if standing.dead_letters:
        yield f"  {standing.dead_letters} dead letters"
    for name, process in standing.processes.items():
        yield f"  {name}: {process.get('state')}, pid {process.get('pid')}, started {process.get('starts')} times"


def _processes(home: Home) -> dict[str, Any]:
    """What the supervisor says of its processes, if it is alive."""
    if home.address() is None:
        return {}
    try:
        return dict(msgspec.json.decode((home.root / "processes.json").read_bytes()))
    except (FileNotFoundError, msgspec.DecodeError):
        return {}


def _list(as_json: bool) -> None:
    folder = Path(os.environ.get("OPENFORGE_RUNS", "runs"))
    runs = sorted(path.name for path in folder.iterdir() if (path / "nats").is_dir()) if folder.is_dir() else []
    states = {name: "running" if Home(name).address() else "resting" for name in runs}
    if as_json:
        typer.echo(msgspec.json.encode(states).decode())
    elif not states:
        typer.echo(f"no runs in {folder.resolve()}: start one with `openforge train RUN.toml`")
    else:
        typer.echo("\n".join(f"{name:<24}{state}" for name, state in states.items()))
