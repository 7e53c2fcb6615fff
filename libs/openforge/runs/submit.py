"""Starting, resting, ending and resuming a run, and knowing which of these is the case.

Promises: a run name stands for one config for ever: the same config resumes it, another is refused
with the fields in which it differs. Only where the learner computes (`HOW_IT_IS_TRAINED`) and publishes may change.
"""

import asyncio

import msgspec

from openforge.bus import CAUGHT_UP, AlreadyTold, Bus, Cursors
from openforge.protos import RunPaused, RunStopped, RunSubmitted, StopReason
from openforge.runs.config import HOW_IT_IS_TRAINED, RunConfig
from openforge.runs.load import canonical, config_of, differing
from openforge.runs.state import RunState

WAIT_S = 0.2


class RunDiffers(ValueError):
    """The run exists with another config."""

    def __init__(self, run: str, fields: list[str]) -> None:
        self.fields = tuple(fields)
        super().__init__(
            f"run {run!r} was started with another config ({'; '.join(fields)}): "
            f"restore these fields to resume it, or give run.name another value"
        )


class UnknownRun(ValueError):
    """Nobody submitted a run of that name."""

    def __init__(self, run: str) -> None:
        super().__init__(f"run {run!r} was never submitted here: start it with `openforge train`, or check the name")


async def state_of(bus: Bus, run: str) -> RunState:
    """What the bus knows of the run now."""
    state = RunState()
    async for told in bus.follow(("run",), run=run, cursors=Cursors(), until_now=True):
        if told is not CAUGHT_UP:
            state = state.after(told.fact)
    return state


async def submit(bus: Bus, config: RunConfig, *, openforge_version: str = "") -> int:
    """Tell that the run should work; its new generation. Raises `RunDiffers` if it exists with another config."""
    text, digest = canonical(config)
    taken = -1
    while True:
        state = await state_of(bus, config.run.name)
        _expect_same(state, config, digest)
        told = RunSubmitted(
            run=config.run.name,
            generation=max(state.generation, taken) + 1,
            config=text,
            config_digest=digest,
            openforge_version=openforge_version,
        )
        try:
            await bus.tell(told)
        except AlreadyTold as already:
            if already.same:
                return told.generation
            taken = told.generation  # by who submitted at the same moment, or by what nobody can read: look again
        else:
            return told.generation


async def join(bus: Bus, config: RunConfig) -> bool:
    """As `submit`, except that a run that works already is left to it, also where its learner computes elsewhere than
    asked. Whether it was submitted just now."""
    state = await state_of(bus, config.run.name)
    if state.phase == "submitted":
        _expect_same(state, config, canonical(config)[1])
        return False
    await submit(bus, config)
    return True


def _expect_same(state: RunState, config: RunConfig, digest: str) -> None:
    if state.config and state.config_digest != digest:
        fields = differing(_trained_as(config, config_of(state.config)), config)
        if fields:  # equal where only a release between them added defaults
            raise RunDiffers(config.run.name, fields)


def _trained_as(config: RunConfig, other: RunConfig) -> RunConfig:
    """`other`, computed where, saved as often and published where `config` is."""
    placed = {name: getattr(config.learner, name) for name in HOW_IT_IS_TRAINED}
    learner = msgspec.structs.replace(other.learner, **placed)
    return msgspec.structs.replace(other, learner=learner, weights=config.weights)


async def stop_run(bus: Bus, run: str, reason: StopReason = StopReason.INTERRUPTED, detail: str = "") -> int:
    """Tell that the newest generation is over; that generation. Stopping twice is no error."""
    state = await state_of(bus, run)
    if state.phase == "absent":
        raise UnknownRun(run)
    await _tell_once(bus, RunStopped(run=run, generation=state.generation, reason=reason, detail=detail))
    return state.generation


async def pause_run(bus: Bus, run: str) -> int:
    """Tell that no new work should begin; submit the same config again to go on."""
    state = await state_of(bus, run)
    if state.phase == "absent":
        raise UnknownRun(run)
    await _tell_once(bus, RunPaused(run=run, generation=state.generation))
    return state.generation


async def _tell_once(bus: Bus, fact: RunStopped | RunPaused) -> None:
    try:
        await bus.tell(fact)
    except AlreadyTold:
        return  # the first telling holds


async def submitted_config(bus: Bus, run: str) -> tuple[RunConfig, int]:
    """The config and generation of the newest `RunSubmitted` that can be read; waits for the first one."""
    while (state := await state_of(bus, run)).phase == "absent":
        await asyncio.sleep(WAIT_S)
    return config_of(state.config), state.generation
