"""Where an attempt's key and its sandbox's token are not, and when they open nothing."""

import asyncio
import logging
from pathlib import Path

import pytest
from manager_floor import RUN, Floor

from openforge.protos import EndReason, EpisodeRequested, EpisodeStarted, TurnRecorded


def on_command_lines(text: str) -> list[str]:
    """The command lines of this host that hold it, those of sandboxes included."""
    lines = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(place.read_text(errors="replace"))
        except OSError:
            continue
    return [line for line in lines if text in line]


async def test_a_model_key_is_on_no_command_line_in_no_log_and_in_no_fact(
    floor: Floor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    episode = await floor.request("endless", "command", timeout_s=15.0)
    async with asyncio.timeout(60):
        while not floor.sleepers():  # it has asked the model, and works
            await asyncio.sleep(0.05)
    (secret,) = floor.turns.secrets
    assert on_command_lines(secret) == []
    ended = await floor.end_of(episode)
    assert ended.reason is EndReason.OUT_OF_TIME
    facts = [await floor.bus.read(kind, RUN, episode) for kind in (EpisodeRequested, EpisodeStarted, TurnRecorded)]
    assert all(facts)
    assert secret not in repr([ended, *facts])
    stored = [place for place in (tmp_path / "nats").rglob("*") if place.is_file()]
    assert any(episode.encode() in place.read_bytes() for place in stored)
    assert not any(secret.encode() in place.read_bytes() for place in stored)  # the bucket of keys has hashes
    logged = repr([vars(record) for record in caplog.records])
    assert "attempt ended" in logged
    assert secret not in logged


async def test_a_token_opens_nothing_when_its_episode_is_over(floor: Floor) -> None:
    """An environment that keeps the sandbox of one episode cannot use it in the next."""
    assert (await floor.attempt("keeps", "pipeline")).reason is EndReason.FINISHED
    ended = await floor.attempt("reuses", "pipeline")
    assert ended.reason is EndReason.SANDBOX_FAILED
    assert "this episode is over" in ended.detail
