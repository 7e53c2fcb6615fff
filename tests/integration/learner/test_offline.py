"""A recorded run trains a learner that was not there."""

from pathlib import Path

from learner_world import (
    LearnerHere,
    feed_run,
    is_published,
    lineage,
    newest_published,
    run_config,
    tiny_model,
    until,
    weights_hash,
)

from openforge.bus import Bus, BusSettings
from openforge.bus.server import NatsServer, ServerConfig, free_port
from openforge.cli import archive
from openforge.runs import submit


async def test_a_learner_forms_the_same_batches_from_a_recorded_run(
    bus: Bus, bus_settings: BusSettings, tmp_path: Path
) -> None:
    config = run_config(tiny_model(tmp_path), run={"name": "lineage", "steps": 3})
    await submit(bus, config)
    learner = await LearnerHere(bus_settings, tmp_path / "live", config.run.name).start()
    await feed_run(bus, config)
    await until(lambda: is_published(bus, config.run.name, 3))
    await learner.stop()
    await archive.export(bus, config.run.name, tmp_path / "out")

    server = NatsServer(ServerConfig(folder=str(tmp_path / "other"), port=free_port()))
    await server.start()
    settings = BusSettings(url=server.url)
    async with Bus.connect(settings, name="test") as other:
        await other.set_up()
        offline = await LearnerHere(settings, tmp_path / "offline", config.run.name).start()
        await archive.tell_as_it_is_trained(other, tmp_path / "out", config.run.name)
        await until(lambda: is_published(other, config.run.name, 3))
        await offline.stop()
        live, again = await lineage(bus, config.run.name), await lineage(other, config.run.name)
        weights, weights_again = [weights_hash(await newest_published(it, config.run.name)) for it in (bus, other)]
    await server.kill()
    assert [batch.episodes for batch in live] == [batch.episodes for batch in again]
    assert [batch.groups for batch in live] == [batch.groups for batch in again]
    assert [batch.loss_tokens for batch in live] == [batch.loss_tokens for batch in again]
    assert weights == weights_again
