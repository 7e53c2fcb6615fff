"""A learner on a real bus trains tokens through the experts that an engine recorded."""

from pathlib import Path

from learner_world import (
    LearnerHere,
    close_group,
    is_published,
    lineage,
    newest_published,
    open_group,
    retired,
    run_config,
    until,
)
from mixtures import episodes, mixture

from openforge.bus import Bus, BusSettings
from openforge.engine.loading import load
from openforge.engine.probe import TOLERANCE
from openforge.protos import RetireReason
from openforge.runs import RunConfig, submit


def replaying(model: Path, name: str) -> RunConfig:
    return run_config(
        model,
        run={"name": name, "steps": 1},
        learner={"routing_replay": True},
        pacing={"groups_per_step": 1, "group_size": 4},
    )


async def test_recorded_experts_come_out_of_the_blobs_into_the_step(
    bus: Bus, bus_settings: BusSettings, tmp_path: Path
) -> None:
    model = mixture(tmp_path / "model")
    config = replaying(model, "replayed")
    await submit(bus, config)
    members, files = episodes(config, model)
    for file in files.values():
        await bus.blobs.put(file)
    learner = await LearnerHere(bus_settings, tmp_path / "home", config.run.name).start()
    await open_group(bus, config, 0, 0)
    await bus.tell_all(members)
    await close_group(bus, config, 0)
    await until(lambda: is_published(bus, config.run.name, 1))
    await learner.stop()
    (batch,) = await lineage(bus, config.run.name)
    assert batch.metrics["routing_replayed"] == 1.0
    assert batch.metrics["gap_max"] < 1e-3
    assert batch.metrics["grad_norm"] > 0.0
    published = await newest_published(bus, config.run.name)
    assert load(Path(published.location), "float32", digest=published.digest).probe_error < TOLERANCE["float32"]


async def test_a_group_whose_experts_are_gone_is_retired_with_the_reason_and_the_next_is_trained(
    bus: Bus, bus_settings: BusSettings, tmp_path: Path
) -> None:
    model = mixture(tmp_path / "model")
    config = replaying(model, "lost")
    await submit(bus, config)
    members, files = episodes(config, model, groups=2)
    (gone,) = members[2].sequences[0].routed_experts
    for digest, file in files.items():
        if digest != gone.digest:
            await bus.blobs.put(file)
    learner = await LearnerHere(bus_settings, tmp_path / "home", config.run.name).start()
    for ordinal in range(2):
        await open_group(bus, config, ordinal, 0)
    await bus.tell_all(members)
    await close_group(bus, config, 0)
    await until(lambda: retired(bus, config.run.name))
    await close_group(bus, config, 1)
    await until(lambda: is_published(bus, config.run.name, 1))
    await learner.stop()
    refused = await retired(bus, config.run.name)
    assert [(fact.episode, fact.reason) for fact in refused] == [
        (one.episode, RetireReason.LOST) for one in members[:4]
    ]
    assert all(members[2].episode in fact.detail and gone.digest in fact.detail for fact in refused)
    (batch,) = await lineage(bus, config.run.name)
    assert batch.groups == (members[4].group,)
    assert batch.metrics["routing_replayed"] == 1.0
