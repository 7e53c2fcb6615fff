"""How attempts end, with real sandboxes, a real bus and harnesses that misbehave."""

import asyncio
import io
import tarfile

import pytest
from manager_floor import RUN, Floor

from openforge.bus import Bus
from openforge.protos import EndReason, EpisodeEnded, EpisodeStarted
from openforge.runs import stop_run


async def left_files(bus: Bus, ended: EpisodeEnded) -> dict[str, bytes]:
    assert ended.artifacts is not None
    with tarfile.open(fileobj=io.BytesIO(await bus.blobs.get(ended.artifacts))) as archive:
        return {
            member.name: content.read()
            for member in archive
            if member.isfile() and (content := archive.extractfile(member)) is not None
        }


@pytest.mark.parametrize(("harness", "kind"), [("good", "command"), ("steps", "pipeline"), ("sync", "pipeline")])
async def test_what_the_agent_left_is_kept_and_its_key_is_dead(floor: Floor, harness: str, kind: str) -> None:
    ended = await floor.attempt(harness, kind)
    assert ended.reason is EndReason.FINISHED, ended
    files = await left_files(floor.bus, ended)
    assert files["workspace/done.txt"] == files["workspace/start.txt"]
    assert [entry.ended for entry in floor.turns.seen] == [False]
    assert floor.turns.secrets[0] not in repr(ended)
    started = await floor.bus.find(EpisodeStarted, RUN, ended.episode, 0)
    assert started is not None
    assert started.fact.isolation == ended.isolation == "full"


@pytest.mark.parametrize(
    ("harness", "kind", "reason"),
    [
        ("mute", "command", EndReason.HARNESS_BROKEN),
        ("absent", "command", EndReason.HARNESS_BROKEN),
        ("crash", "command", EndReason.AGENT_CRASHED),
        ("talker", "command", EndReason.OUT_OF_TURNS),
        ("hog", "command", EndReason.OUT_OF_MEMORY),
        ("raises", "pipeline", EndReason.AGENT_CRASHED),
        ("censored", "pipeline", EndReason.ENGINE_FAILED),
        ("claims", "pipeline", EndReason.GAVE_UP),
        ("steps", "direct", EndReason.HARNESS_BROKEN),
    ],
)
async def test_every_end_has_its_reason(floor: Floor, harness: str, kind: str, reason: EndReason) -> None:
    ended = await floor.attempt(harness, kind)
    assert ended.reason is reason, ended
    assert (ended.artifacts is not None) == reason.policy_can_cause
    for secret in floor.turns.secrets:
        assert secret not in repr(ended)
    assert ended.claim == (0.5 if harness == "claims" else None)


@pytest.mark.parametrize(("harness", "kind"), [("endless", "command"), ("hangs", "pipeline")])
async def test_an_agent_that_never_ends_is_out_of_time(floor: Floor, harness: str, kind: str) -> None:
    await floor.attempt("steps", "pipeline")  # the env host is up
    ended = await floor.attempt(harness, kind, timeout_s=1.5)
    assert ended.reason is EndReason.OUT_OF_TIME
    assert ended.agent_s < 15  # of the 20 that it has elsewhere
    assert floor.sleepers() == 0


async def test_a_direct_environment_is_stepped_by_our_loop_and_its_counts_are_told(floor: Floor) -> None:
    ended = await floor.attempt("stepped", "direct")
    assert ended.reason is EndReason.FINISHED, ended
    assert ended.metrics == {"steps": 2.0, "turns": 2.0}
    assert len(floor.turns.seen) == 2
    files = await left_files(floor.bus, ended)
    assert files["workspace/done.txt"] == files["workspace/start.txt"]


async def test_a_late_writer_is_dead_before_its_work_is_read(floor: Floor) -> None:
    ended = await floor.attempt("writer", "command")
    assert ended.reason is EndReason.FINISHED
    assert "workspace/clock" in await left_files(floor.bus, ended)


async def test_a_dead_env_host_ends_its_attempts_and_the_next_one_gets_a_new_host(floor: Floor) -> None:
    hanging = await floor.request("hangs", "pipeline")
    await asyncio.sleep(2.0)
    dead = await floor.attempt("dies", "pipeline")
    assert dead.reason is EndReason.HOST_LOST
    assert (await floor.end_of(hanging)).reason is EndReason.HOST_LOST
    assert (await floor.attempt("steps", "pipeline")).reason is EndReason.FINISHED


async def test_a_stopped_run_cancels_what_is_in_flight_and_what_comes_later(floor: Floor) -> None:
    working = [await floor.request("endless", "command"), await floor.request("hangs", "pipeline")]
    await asyncio.sleep(2.0)
    await stop_run(floor.bus, RUN)
    late = await floor.request("good", "command")
    for episode in (*working, late):
        assert (await floor.end_of(episode)).reason is EndReason.CANCELLED


async def test_forty_attempts_at_once_all_end(floor: Floor) -> None:
    kinds = [("steps", "pipeline"), ("good", "command")]
    episodes = [await floor.request(*kinds[n % 2]) for n in range(40)]
    ends = await asyncio.gather(*(floor.end_of(episode) for episode in episodes))
    assert {ended.reason for ended in ends} == {EndReason.FINISHED}


async def test_the_services_of_a_task_are_up_before_its_agent_and_gone_after_it(floor: Floor) -> None:
    ended = await floor.attempt("good", "command", task="served")
    assert ended.reason is EndReason.FINISHED, ended
    files = await left_files(floor.bus, ended)
    assert files["workspace/done.txt"] == files["workspace/start.txt"] != b""
    assert floor.sleepers() == 0


async def test_a_service_that_does_not_come_up_is_nobodys_doing(floor: Floor) -> None:
    ended = await floor.attempt("good", "command", task="sick")
    assert ended.reason is EndReason.SANDBOX_FAILED
    assert "service writer" in ended.detail
    assert "out of ink" in ended.detail
