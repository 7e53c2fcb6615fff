"""A pool of two ranks of verl's FSDP engine on a real bus: killed, and gone on with by another number of ranks."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from learner_world import (
    LearnerProcess,
    feed_run,
    is_published,
    is_trained,
    lineage,
    newest_published,
    run_config,
    tiny_model,
    until,
    weights_hash,
)
from safetensors.torch import load_file
from typer.testing import CliRunner

from openforge.bus import Bus, BusSettings
from openforge.bus.server import NatsServer, ServerConfig, free_port
from openforge.cli.checkpoint_command import app
from openforge.runs import RunConfig
from openforge.runs.submit import submit


@pytest.fixture
async def settings(tmp_path: Path) -> AsyncIterator[BusSettings]:
    server = NatsServer(ServerConfig(folder=str(tmp_path / "nats"), port=free_port()))
    await server.start()
    yield BusSettings(url=server.url, connect_timeout_s=10.0)
    await server.kill()


@pytest.fixture
async def bus(settings: BusSettings) -> AsyncIterator[Bus]:
    async with Bus.connect(settings, name="test") as bus:
        await bus.set_up()
        yield bus


def on_verl(model: Path, name: str, ranks: int) -> RunConfig:
    return run_config(model, name, learner={"backend": "verl", "world_size": ranks})


async def finished(bus: Bus, run: str) -> None:
    await until(lambda: is_published(bus, run, 6))


async def test_after_the_death_of_each_rank_the_weights_are_those_of_a_pool_that_was_left_alone(
    bus: Bus, settings: BusSettings, tmp_path: Path
) -> None:
    model = tiny_model(tmp_path)
    calm, wild = (on_verl(model, name, 2) for name in ("calm", "wild"))
    for config in (calm, wild):
        await submit(bus, config)
    quiet = await LearnerProcess(settings, tmp_path / "calm", "calm").start()
    await asyncio.gather(feed_run(bus, calm), finished(bus, "calm"))
    assert await quiet.stop() == 0

    feeding = asyncio.create_task(feed_run(bus, wild))
    learner = await LearnerProcess(settings, tmp_path / "wild", "wild").start()
    await until(lambda: is_trained(bus, "wild", 1))
    assert await learner.kill_follower() == 1, "rank 0 does not go on alone"
    learner = await LearnerProcess(settings, tmp_path / "wild", "wild").start()
    await until(lambda: is_trained(bus, "wild", 3))
    await learner.kill()
    learner = await LearnerProcess(settings, tmp_path / "wild", "wild").start()
    await asyncio.gather(feeding, finished(bus, "wild"))
    assert await learner.stop() == 0
    assert '"event":"computing again"' in learner.log()
    left, right = await lineage(bus, "calm"), await lineage(bus, "wild")
    assert [batch.episodes for batch in left] == [batch.episodes for batch in right]
    assert weights_hash(await newest_published(bus, "calm")) == weights_hash(await newest_published(bus, "wild"))


async def test_a_run_goes_on_with_another_number_of_ranks_and_leaves_a_plain_folder_of_what_it_published(
    bus: Bus, settings: BusSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, home = tiny_model(tmp_path), tmp_path / "runs/lineage"
    feeding = asyncio.create_task(feed_run(bus, on_verl(model, "lineage", 2)))
    for ranks, version in ((2, 2), (1, 4), (2, 6)):
        await submit(bus, on_verl(model, "lineage", ranks))
        learner = await LearnerProcess(settings, home, "lineage").start()
        await until(lambda version=version: is_published(bus, "lineage", version))
        assert await learner.stop() == 0
    await feeding
    assert [batch.version for batch in await lineage(bus, "lineage")] == list(range(1, 7))
    assert "computing again" not in learner.log(), "each began with what the one before had saved"
    monkeypatch.setenv("OPENFORGE_RUNS", str(tmp_path / "runs"))
    done = CliRunner().invoke(app, ["export", "lineage", str(tmp_path / "plain")])
    assert done.exit_code == 0, done.output
    exported = load_file(tmp_path / "plain/model.safetensors")
    published = load_file(Path((await newest_published(bus, "lineage")).location) / "model.safetensors")
    assert exported.keys() == published.keys()
    assert all(torch.equal(exported[name], published[name]) for name in published)
