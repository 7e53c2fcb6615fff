"""Submitting, stopping and resuming a run on a real server."""

import asyncio

import msgspec
import pytest

from openforge.bus import Bus
from openforge.protos import RunSubmitted, StopReason
from openforge.runs import (
    RunConfig,
    RunDiffers,
    UnknownRun,
    pause_run,
    state_of,
    stop_run,
    submit,
    submitted_config,
)


def config(**run: object) -> RunConfig:
    return msgspec.convert(
        {
            "run": {"name": "r", "steps": 4, **run},
            "model": {"path": "/m"},
            "environment": {"name": "shell", "harness": "mini"},
        },
        RunConfig,
    )


async def test_the_same_config_resumes_a_run_with_the_next_generation(bus: Bus) -> None:
    assert await submit(bus, config()) == 0
    await stop_run(bus, "r", StopReason.INTERRUPTED)
    assert (await state_of(bus, "r")).phase == "stopped"
    assert await submit(bus, config()) == 1
    state = await state_of(bus, "r")
    assert (state.phase, state.generation) == ("submitted", 1)


async def test_another_config_under_the_same_name_is_refused_by_field(bus: Bus) -> None:
    await submit(bus, config())
    with pytest.raises(RunDiffers, match=r"run\.seed: 0 -> 7; run\.steps: 4 -> 5"):
        await submit(bus, config(steps=5, seed=7))
    assert await bus.count(RunSubmitted, "r") == 1


async def test_where_the_learner_computes_may_change_when_a_run_is_resumed(bus: Bus) -> None:
    await submit(bus, config())
    elsewhere = msgspec.structs.replace(
        config(), learner=msgspec.structs.replace(config().learner, world_size=2, checkpoint_every=1)
    )
    assert await submit(bus, elsewhere) == 1
    assert await submitted_config(bus, "r") == (elsewhere, 1)
    other = msgspec.structs.replace(elsewhere, learner=msgspec.structs.replace(elsewhere.learner, learning_rate=1.0))
    with pytest.raises(RunDiffers) as refused:
        await submit(bus, other)
    assert refused.value.fields == ("learner.learning_rate: 1e-05 -> 1.0",)


async def test_stopping_twice_is_no_error_and_a_run_that_never_was_is(bus: Bus) -> None:
    await submit(bus, config())
    assert await stop_run(bus, "r") == await stop_run(bus, "r", StopReason.FAILED, "again") == 0
    assert (await state_of(bus, "r")).reason is StopReason.INTERRUPTED
    with pytest.raises(UnknownRun, match="was never submitted"):
        await stop_run(bus, "other")


async def test_a_paused_run_goes_on_when_it_is_submitted_again(bus: Bus) -> None:
    await submit(bus, config())
    await pause_run(bus, "r")
    assert (await state_of(bus, "r")).phase == "paused"
    await submit(bus, config())
    assert (await state_of(bus, "r")).phase == "submitted"


async def test_services_wait_for_the_config_and_get_the_newest(bus: Bus) -> None:
    waiting = asyncio.create_task(submitted_config(bus, "r"))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await submit(bus, config())
    assert await waiting == (config(), 0)
    await submit(bus, config())
    assert await submitted_config(bus, "r") == (config(), 1)


async def test_services_start_although_something_that_is_no_fact_lies_among_the_submissions(bus: Bus) -> None:
    await submit(bus, config())
    await bus.link.publish(RunSubmitted.subject_for("r", 7), b"no fact", {})
    assert await submitted_config(bus, "r") == (config(), 0)


async def test_a_generation_that_is_taken_by_what_nobody_can_read_is_passed_over(bus: Bus) -> None:
    await submit(bus, config())
    await bus.link.publish(RunSubmitted.subject_for("r", 1), b"no fact", {})
    async with asyncio.timeout(20):
        assert await submit(bus, config()) == 2
    assert await submitted_config(bus, "r") == (config(), 2)


async def test_two_clients_at_the_same_moment_get_generations_of_their_own(bus: Bus) -> None:
    generations = await asyncio.gather(*(submit(bus, config(), openforge_version=str(i)) for i in range(4)))
    assert sorted(generations) == [0, 1, 2, 3]
