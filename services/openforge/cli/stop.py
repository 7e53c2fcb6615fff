"""`openforge stop`, `pause`, `resume`: what a client may say of a run."""

import time
from collections.abc import Awaitable, Callable
from typing import Annotated

import typer

from openforge.bus import Bus
from openforge.cli.home import Home
from openforge.cli.reach import BAD_USE, fail, run_on_bus
from openforge.protos import StopReason
from openforge.runs import UnknownRun, config_of, pause_run, state_of, stop_run, submit

STOP_TIMEOUT_S = 90.0

Run = Annotated[str, typer.Argument(help="The run's name.", show_default=False)]


def stop(
    run: Run,
    wait: Annotated[bool, typer.Option(help="Return when everything of the run has ended on this machine.")] = True,
) -> None:
    """End a run in good order. `openforge train` with the same run file resumes it."""
    home = Home(run)
    here = home.address() is not None
    generation = run_on_bus(
        run, lambda bus: _of_known(lambda: stop_run(bus, run, StopReason.INTERRUPTED, "openforge stop"))
    )
    typer.echo(f"run {run}: generation {generation} stopped")
    if here and wait and not _gone(home, STOP_TIMEOUT_S):
        fail(f"run {run!r} still works after {STOP_TIMEOUT_S:.0f} s: see {home.logs}, or end its process")


def pause(run: Run) -> None:
    """Open nothing new until `openforge resume`; what is in flight goes on."""
    generation = run_on_bus(run, lambda bus: _of_known(lambda: pause_run(bus, run)))
    typer.echo(f"run {run}: generation {generation} paused")


def resume(run: Run) -> None:
    """Let a paused run go on."""
    generation = run_on_bus(run, lambda bus: _of_known(lambda: _submit_again(bus, run)))
    typer.echo(f"run {run}: generation {generation} submitted")


async def _submit_again(bus: Bus, run: str) -> int:
    state = await state_of(bus, run)
    if state.phase == "absent":
        raise UnknownRun(run)
    return await submit(bus, config_of(state.config))


async def _of_known(act: Callable[[], Awaitable[int]]) -> int:
    try:
        return await act()
    except UnknownRun as error:
        fail(str(error), BAD_USE)


def _gone(home: Home, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while home.address() is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True
