"""Curves as TensorBoard, parquet, wandb and trackio keep them: written by the command, read back from their files."""

import contextlib
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
from pretend_run import PretendRun, Weather
from tensorboardX.proto.event_pb2 import Event

from openforge.bus import Bus
from openforge.protos import BatchTrained, TrajectoryVerified
from openforge.runs import RunConfig, submit

CONFIG = msgspec.convert(
    {
        "run": {"name": "r", "steps": 3},
        "model": {"path": "/m"},
        "environment": {"name": "shell", "harness": "mini"},
        "pacing": {"groups_per_step": 2, "group_size": 3, "in_flight": 24},
        "evaluation": {"heldout_episodes": 5},
    },
    RunConfig,
)


@pytest.fixture
async def told(bus: Bus) -> PretendRun:
    """A whole run on the bus."""
    await submit(bus, CONFIG)
    run = PretendRun(CONFIG, Weather(seed=2)).run()
    await bus.tell_all(fact for _, fact in run.facts)
    return run


def sink(url: str, *to: str, name: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "openforge.cli", "sink", "r", "--once", *(f"--to={each}" for each in to)]
    command += ["--name", name] if name else []
    return subprocess.run(command, env=os.environ | {"OPENFORGE_NATS_URL": url} | env, capture_output=True, text=True)


def events(folder: Path) -> Iterator[Event]:
    """TFRecord: length, its checksum, data, its checksum; files in the order in which they were begun."""
    for file in sorted(folder.glob("events.out.tfevents.*"), key=lambda file: file.stat().st_mtime_ns):
        data = file.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            yield Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]


def scalars(folder: Path) -> list[tuple[str, int, float]]:
    """What TensorBoard shows: a session that purges hides the points before it."""
    found: list[tuple[str, int, float]] = []
    for event in events(folder):
        if event.session_log.status == 1:
            found = [point for point in found if point[1] < event.step]
        found += [(value.tag, event.step, round(value.simple_value, 4)) for value in event.summary.value]
    return found


async def test_tensorboard_and_parquet_hold_each_batch_once_also_when_written_again(
    bus: Bus, told: PretendRun, tmp_path: Path
) -> None:
    targets = (f"tensorboard:{tmp_path / 'tb'}", f"parquet:{tmp_path / 'pq'}")
    for _ in range(2):
        done = sink(bus.settings.url, *targets)
        assert done.returncode == 0, done.stderr
    batches = [fact for _, fact in told.facts if isinstance(fact, BatchTrained)]
    verdicts = [fact for _, fact in told.facts if isinstance(fact, TrajectoryVerified)]
    heldout = [fact.reward for fact in verdicts if fact.group.startswith("e003")]
    shown = scalars(tmp_path / "tb")
    assert len(shown) == len(set(shown))
    assert [point for point in shown if point[0] == "train/reward_mean"] == [
        ("train/reward_mean", fact.version, round(fact.reward_mean, 4)) for fact in batches
    ]
    assert ("heldout/reward_mean", 3, round(sum(heldout) / len(heldout), 4)) in shown
    points = pq.read_table(tmp_path / "pq" / "points.parquet").to_pylist()
    assert {(row["name"], row["version"], round(row["value"], 4)) for row in points} == set(shown)
    episodes = pq.read_table(tmp_path / "pq" / "episodes.parquet").to_pylist()
    assert sorted(row["episode"] for row in episodes) == sorted(fact.episode for fact in verdicts)


async def test_a_target_that_is_none_is_one_clear_error(bus: Bus) -> None:
    done = sink(bus.settings.url, "tensorbord:x")
    assert done.returncode == 2
    assert "--to tensorbord:x: use one of tensorboard:DIR" in done.stderr


async def test_wandb_offline_keeps_the_points(bus: Bus, told: PretendRun, tmp_path: Path) -> None:
    done = sink(bus.settings.url, "wandb:p", WANDB_MODE="offline", WANDB_DIR=str(tmp_path), WANDB_SILENT="true")
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert file.read_bytes().count(b"train/reward_mean") >= 3


async def test_trackio_keeps_the_points_and_a_named_sink_sends_none_twice(
    bus: Bus, told: PretendRun, tmp_path: Path
) -> None:
    for _ in range(2):
        done = sink(bus.settings.url, "trackio:p", name="mine", TRACKIO_DIR=str(tmp_path))
        assert done.returncode == 0, done.stderr
    with contextlib.closing(sqlite3.connect(next(tmp_path.glob("p*.db")))) as db:
        rows = [msgspec.json.decode(row[0]) for row in db.execute("select metrics from metrics")]
    batches = [row["version"] for row in rows if "train/reward_mean" in row]
    assert sorted(batches) == [1, 2, 3]
