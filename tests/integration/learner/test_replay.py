"""A learner on a real bus trains tokens through the experts that an engine recorded."""

from pathlib import Path

from learner_world import (
    LearnerHere,
    close_group,
    is_published,
    lineage,
    newest_published,
    open_group,
    run_config,
    until,
)
from mixtures import episodes, mixture

from openforge.bus import Bus, BusSettings
from openforge.engine.loading import load
from openforge.engine.probe import TOLERANCE
from openforge.runs import submit


async def test_recorded_experts_come_out_of_the_blobs_into_the_step(
    bus: Bus, bus_settings: BusSettings, tmp_path: Path
) -> None:
    model = mixture(tmp_path / "model")
    config = run_config(
        model,
        run={"name": "replayed", "steps": 1},
        learner={"routing_replay": True},
        pacing={"groups_per_step": 1, "group_size": 4},
    )
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
