"""A learner process on a real bus: its lineage is the same whatever happens to it."""

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest
from learner_world import (
    LearnerHere,
    LearnerProcess,
    close_group,
    feed_group,
    feed_run,
    is_published,
    is_trained,
    lineage,
    newest_published,
    open_group,
    retired,
    run_config,
    tiny_model,
    until,
    verdict,
    weights_hash,
)

from openforge.bus import Bus, BusSettings
from openforge.protos import BatchTrained, PolicyPublished, RetireReason, TrajectoryVerified
from openforge.runs.submit import submit
from openforge.weights import check

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=5")


def is_there(published: PolicyPublished) -> bool:
    return Path(published.location).exists()


def tear(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


async def is_retired(bus: Bus, run: str, count: int) -> bool:
    return len(await retired(bus, run)) == count


async def finished(bus: Bus, run: str, steps: int) -> None:
    await until(lambda: is_published(bus, run, steps))


async def test_a_run_is_trained_to_its_end_and_every_version_is_published(
    bus: Bus, bus_settings: BusSettings, tmp_path: Path
) -> None:
    config = run_config(tiny_model(tmp_path))
    await submit(bus, config)
    learner = await LearnerProcess(bus_settings, tmp_path / "home", config.run.name).start()
    await asyncio.gather(feed_run(bus, config), finished(bus, config.run.name, 6))
    batches = await lineage(bus, config.run.name)
    assert [(batch.base, batch.version) for batch in batches] == [(step, step + 1) for step in range(6)]
    assert [batch.groups for batch in batches] == [(f"g{2 * s:06d}", f"g{2 * s + 1:06d}") for s in range(6)]
    assert all(batch.lag <= 1 for batch in batches)
    assert batches[3].metrics["grad_norm"] > 0
    newest = await newest_published(bus, config.run.name)
    check(newest.location, newest.digest)
    assert await learner.stop() == 0
    assert sorted(folder.name for folder in (tmp_path / "home/weights").iterdir()) == [
        "v000004-0",
        "v000005-0",
        "v000006-0",
    ]


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.heavy)])
async def test_a_learner_killed_at_random_points_ends_with_the_same_weights(
    bus: Bus, bus_settings: BusSettings, tmp_path: Path, seed: int
) -> None:
    model, rng = tiny_model(tmp_path), random.Random(seed)
    calm, wild = run_config(model, "calm"), run_config(model, "wild")
    for config in (calm, wild):
        await submit(bus, config)
    quiet = await LearnerProcess(bus_settings, tmp_path / "calm", "calm").start()
    await asyncio.gather(feed_run(bus, calm), finished(bus, "calm", 6))
    await quiet.stop()

    feeding = asyncio.create_task(feed_run(bus, wild))
    kills, learner = 0, await LearnerProcess(bus_settings, tmp_path / "wild", "wild").start()
    while not await is_published(bus, "wild", 6):
        learner.expect_alive()
        if kills < 4 and await is_trained(bus, "wild", kills + 1):
            await asyncio.sleep(rng.uniform(0, 0.1))
            await learner.kill()
            kills += 1
            learner = await LearnerProcess(bus_settings, tmp_path / "wild", "wild").start()
        await asyncio.sleep(0.005)
    await feeding
    await learner.stop()
    assert kills >= 3
    await same_lineage(bus, "calm", "wild", steps=6)


async def same_lineage(bus: Bus, one: str, other: str, steps: int) -> None:
    """The same batches and the same bits of weights at every version, and each verdict trained once."""
    left, right = await lineage(bus, one), await lineage(bus, other)
    assert [batch.episodes for batch in left] == [batch.episodes for batch in right]
    for version in range(steps + 1):
        same = {
            weights_hash(told.fact)
            for run in (one, other)
            for told in await bus.read(PolicyPublished, run, version)
            if is_there(told.fact)
        }
        assert len(same) <= 1, f"version {version} has one set of weights"
    assert weights_hash(await newest_published(bus, one)) == weights_hash(await newest_published(bus, other))
    for run, batches in ((one, left), (other, right)):
        trained = [episode for batch in batches for episode in batch.episodes]
        verified = {told.fact.episode for told in await bus.read(TrajectoryVerified, run)}
        gone = {fact.episode for fact in await retired(bus, run)}
        assert len(trained) == len(set(trained)), "none is trained twice"
        assert set(trained) | gone == verified, "none is lost"


async def test_two_ranks_of_which_each_is_killed_end_with_the_weights_of_two_that_were_not(
    bus: Bus, bus_settings: BusSettings, tmp_path: Path
) -> None:
    model = tiny_model(tmp_path)
    calm, wild = (run_config(model, name, learner={"world_size": 2}) for name in ("calm", "wild"))
    for config in (calm, wild):
        await submit(bus, config)
    quiet = await LearnerProcess(bus_settings, tmp_path / "calm", "calm").start()
    await asyncio.gather(feed_run(bus, calm), finished(bus, "calm", 6))
    assert await quiet.stop() == 0

    feeding = asyncio.create_task(feed_run(bus, wild))
    learner = await LearnerProcess(bus_settings, tmp_path / "wild", "wild").start()
    await until(lambda: is_trained(bus, "wild", 1))
    assert await learner.kill_follower() == 1, "rank 0 does not go on alone"
    learner = await LearnerProcess(bus_settings, tmp_path / "wild", "wild").start()
    await until(lambda: is_trained(bus, "wild", 3))
    (follower,) = learner.followers()
    await learner.kill()
    await until(lambda: is_gone(follower))
    learner = await LearnerProcess(bus_settings, tmp_path / "wild", "wild").start()
    await asyncio.gather(feeding, finished(bus, "wild", 6))
    assert await learner.stop() == 0
    assert learner.log().count('"event":"computing again"') >= 1
    await same_lineage(bus, "calm", "wild", steps=6)


@pytest.mark.heavy
async def test_a_pool_under_torchrun_starts_again_when_a_rank_is_killed_and_ends_in_good_order(
    bus: Bus, bus_settings: BusSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(tmp_path)
    calm, wild = (run_config(model, name, learner={"world_size": 2}) for name in ("calm", "wild"))
    for config in (calm, wild):
        await submit(bus, config)
    quiet = await LearnerProcess(bus_settings, tmp_path / "calm", "calm").start()
    await asyncio.gather(feed_run(bus, calm), finished(bus, "calm", 6))
    assert await quiet.stop() == 0

    feeding = asyncio.create_task(feed_run(bus, wild))
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    pool = await LearnerProcess(bus_settings, tmp_path / "wild", "wild", TORCHRUN).start()
    for version in (1, 3):
        await until(lambda version=version: is_trained(bus, "wild", version))
        os.kill(pool.followers()[-1], signal.SIGKILL)
    await asyncio.gather(feeding, finished(bus, "wild", 6))
    await pool.stop()  # torchrun itself ends with 1 after a signal
    assert '"event":"stopped"' in pool.log()
    await same_lineage(bus, "calm", "wild", steps=6)


@pytest.mark.heavy
async def test_a_run_goes_on_with_another_number_of_ranks(bus: Bus, bus_settings: BusSettings, tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    two, one = (run_config(model, learner={"world_size": ranks}) for ranks in (2, 1))
    feeding = asyncio.create_task(feed_run(bus, two))
    for config, version in ((two, 2), (one, 4), (two, 6)):
        await submit(bus, config)
        learner = await LearnerProcess(bus_settings, tmp_path / "home", config.run.name).start()
        await until(lambda version=version: is_published(bus, "lineage", version))
        assert len(learner.followers()) == config.learner.world_size - 1
        assert await learner.stop() == 0
    await feeding
    assert [batch.version for batch in await lineage(bus, "lineage")] == list(range(1, 7))
    assert "computing again" not in learner.log(), "each began with what the one before had saved"


async def test_a_rank_that_dies_before_all_have_met_ends_rank_0_too(
    bus: Bus, bus_settings: BusSettings, tmp_path: Path
) -> None:
    config = run_config(tiny_model(tmp_path), learner={"world_size": 2})
    await submit(bus, config)
    learner = await LearnerProcess(bus_settings, tmp_path / "home", config.run.name).start()
    assert await learner.kill_follower() == 1
    assert '"event":"rank ended"' in learner.log()


async def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


async def test_a_second_learner_in_the_same_folder_is_a_zombie(
    bus: Bus, bus_settings: BusSettings, tmp_path: Path
) -> None:
    config = run_config(tiny_model(tmp_path))
    await submit(bus, config)
    first = await LearnerProcess(bus_settings, tmp_path / "home", config.run.name).start()
    await until(lambda: is_published(bus, config.run.name, 0))
    second = await LearnerProcess(bus_settings, tmp_path / "home", config.run.name).start()
    assert await second.wait() == 3
    assert await first.stop() == 0


async def test_of_two_learners_in_two_folders_one_trains_and_the_other_exits_as_a_zombie(
    bus: Bus, bus_settings: BusSettings, tmp_path: Path
) -> None:
    config = run_config(tiny_model(tmp_path))
    await submit(bus, config)
    learners = [
        await LearnerProcess(bus_settings, tmp_path / place, config.run.name).start() for place in ("one", "two")
    ]
    waits = [asyncio.create_task(learner.wait()) for learner in learners]

    async def both_at_work_or_one_ended() -> bool:
        return any(wait.done() for wait in waits) or all('"event":"ready"' in learner.log() for learner in learners)

    await until(both_at_work_or_one_ended)
    feeding = asyncio.create_task(feed_run(bus, config))
    done, running = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED, timeout=240)
    assert [task.result() for task in done] == [3]
    await finished(bus, config.run.name, 6)
    await feeding
    assert len(running) == 1
    assert [batch.version for batch in await lineage(bus, config.run.name)] == list(range(1, 7))
    for learner in learners:
        await learner.stop()


async def test_other_settings_do_not_continue_a_lineage(bus: Bus, bus_settings: BusSettings, tmp_path: Path) -> None:
    config = run_config(tiny_model(tmp_path))
    await submit(bus, config)
    await bus.tell(
        BatchTrained(run=config.run.name, version=1, base=0, episodes=(), groups=(), config_digest="0" * 64, lag=0)
    )
    learner = await LearnerProcess(bus_settings, tmp_path / "home", config.run.name).start()
    assert await learner.wait() == 2
    assert "version 1 was trained with the settings 000000000000" in learner.log()


async def test_weights_that_were_lost_are_published_again_with_the_next_incarnation(
    bus: Bus, bus_settings: BusSettings, tmp_path: Path
) -> None:
    config = run_config(tiny_model(tmp_path), run={"steps": 1}, pacing={"max_lag": 0})
    run = config.run.name
    await submit(bus, config)
    learner = await LearnerHere(bus_settings, tmp_path / "home", run).start()
    await asyncio.gather(feed_run(bus, config), finished(bus, run, 1))
    await learner.stop()
    before = await newest_published(bus, run)
    tear(Path(before.location, "model.safetensors"))
    expected = weights_hash(before)
    learner = await LearnerHere(bus_settings, tmp_path / "home", run).start()

    async def again() -> bool:
        return (await newest_published(bus, run)).incarnation == 1

    await until(again)
    assert weights_hash(await newest_published(bus, run)) == expected
    await learner.stop()
    learner = await LearnerHere(bus_settings, tmp_path / "home", run).start()
    await feed_group(bus, config, 9, 1)
    await until(lambda: is_retired(bus, run, 4))
    await learner.stop()
    assert (await newest_published(bus, run)).incarnation == 1, "what is whole is not published again"


async def test_a_torn_checkpoint_is_passed_over(bus: Bus, bus_settings: BusSettings, tmp_path: Path) -> None:
    config = run_config(tiny_model(tmp_path), run={"steps": 4})
    run = config.run.name
    await submit(bus, config)
    learner = await LearnerHere(bus_settings, tmp_path / "home", run).start()
    await asyncio.gather(feed_run(bus, config), finished(bus, run, 4))
    await learner.stop()
    digest = weights_hash(await newest_published(bus, run))
    newest = tmp_path / "home/checkpoints/c000004"
    tear(max((file for file in newest.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size))
    published = await newest_published(bus, run)
    tear(Path(published.location, "manifest.json"))
    learner = await LearnerHere(bus_settings, tmp_path / "home", run).start()

    async def again() -> bool:
        return (await newest_published(bus, run)).incarnation == 1

    await until(again)
    assert weights_hash(await newest_published(bus, run)) == digest
    await learner.stop()


async def test_stale_groups_are_dropped_and_leftovers_are_not_needed(
    bus: Bus, bus_settings: BusSettings, tmp_path: Path
) -> None:
    config = run_config(tiny_model(tmp_path), run={"steps": 2}, pacing={"groups_per_step": 1, "max_lag": 0})
    run = config.run.name
    await submit(bus, config)
    learner = await LearnerHere(bus_settings, tmp_path / "home", run).start()
    for ordinal in (0, 1):
        await feed_group(bus, config, ordinal, 0)
    await until(lambda: is_published(bus, run, 1))
    await feed_group(bus, config, 2, 1)
    await until(lambda: is_published(bus, run, 2))
    await feed_group(bus, config, 3, 1)
    await until(lambda: is_retired(bus, run, 8))
    reasons = {(fact.group, fact.reason) for fact in await retired(bus, run)}
    assert reasons == {("g000001", RetireReason.STALE), ("g000003", RetireReason.NOT_NEEDED)}
    assert [batch.lag for batch in await lineage(bus, run)] == [0, 0]
    await learner.stop()


async def test_wait_holds_the_step_and_retires_who_blocks_too_long(
    bus: Bus, bus_settings: BusSettings, tmp_path: Path
) -> None:
    pacing = {"groups_per_step": 1, "max_lag": 0, "staleness": "wait", "wait_timeout_s": 2.0}
    config = run_config(tiny_model(tmp_path), run={"steps": 2}, pacing=pacing)
    run = config.run.name
    await submit(bus, config)
    learner = await LearnerHere(bus_settings, tmp_path / "home", run).start()
    await until(lambda: is_published(bus, run, 0))
    await open_group(bus, config, 0, 0)
    await bus.tell(verdict(config, 0, 0, 0))
    await feed_group(bus, config, 1, 0)
    await asyncio.sleep(1.0)
    assert not await is_trained(bus, run, 1)
    await until(lambda: is_trained(bus, run, 1))
    assert {(fact.episode, fact.reason) for fact in await retired(bus, run)} == {("g000000-0", RetireReason.TIMED_OUT)}
    await learner.stop()


async def test_mask_trains_old_groups_without_their_old_tokens(
    bus: Bus, bus_settings: BusSettings, tmp_path: Path
) -> None:
    config = run_config(
        tiny_model(tmp_path), run={"steps": 2}, pacing={"groups_per_step": 1, "max_lag": 0, "staleness": "mask"}
    )
    run = config.run.name
    await submit(bus, config)
    learner = await LearnerHere(bus_settings, tmp_path / "home", run).start()
    await feed_group(bus, config, 0, 0)
    await until(lambda: is_published(bus, run, 1))
    await open_group(bus, config, 1, 0)
    for member in range(4):
        await bus.tell(verdict(config, 1, member, member % 2))
    await close_group(bus, config, 1)
    await until(lambda: is_published(bus, run, 2))
    batch = (await lineage(bus, run))[1]
    assert batch.lag == 0
    assert batch.masked_tokens > 0
    assert batch.loss_tokens > 0
    await learner.stop()


async def test_sentinels_are_retired_as_invalid(bus: Bus, bus_settings: BusSettings, tmp_path: Path) -> None:
    config = run_config(tiny_model(tmp_path), run={"steps": 1}, pacing={"groups_per_step": 1})
    run = config.run.name
    await submit(bus, config)
    learner = await LearnerHere(bus_settings, tmp_path / "home", run).start()
    await feed_group(bus, config, 0, 0, logprob=-9999.0)
    await feed_group(bus, config, 1, 0)
    await until(lambda: is_trained(bus, run, 1))
    facts = await retired(bus, run)
    assert {(fact.group, fact.reason) for fact in facts} == {("g000000", RetireReason.INVALID)}
    assert "-9999" in facts[0].detail
    await learner.stop()
