"""Whole runs of the tiny model, as a user starts them: six processes, a real bus, real sandboxes."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from openforge.cli.soak import TARGETS, TWO_RANKS, Disturbed, disturbed, ledger_of_home

TINY = Path(__file__).parents[2] / "examples" / "tiny.toml"


async def ended_well(run: Disturbed, within_s: float) -> dict[str, Any]:
    """The summary of a run that ends by itself; its log where it does not."""
    async with asyncio.timeout(within_s):
        exit_code = await run.process.wait()
    log = (run.home.root / "train.log").read_text(errors="replace")[-4000:]
    assert exit_code == 0, log
    summary: dict[str, Any] = msgspec.json.decode(run.home.summary.read_bytes())
    return summary


def lineage_holds(run: Disturbed, summary: dict[str, Any], max_lag: int) -> None:
    exit_code, ledger = ledger_of_home(run.home)
    assert exit_code == 0, ledger
    assert summary["ledger_closes"]
    assert summary["lag_max"] <= max_lag


async def test_the_tiny_model_learns_inside_the_small_harness(tmp_path: Path) -> None:
    async with disturbed(TINY, tmp_path, "learns") as run:
        summary = await ended_well(run, within_s=900)
    lineage_holds(run, summary, max_lag=1)
    assert summary["reward_first_fifth"] < 0.6
    assert summary["reward_last_fifth"] > 0.85
    assert summary["delivered_fraction"] == 1.0
    assert run.home.report.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    "staleness",
    [
        pytest.param("drop", marks=pytest.mark.heavy),
        pytest.param("wait", marks=pytest.mark.long),
        pytest.param("mask", marks=pytest.mark.long),
    ],
)
async def test_nothing_is_lost_when_each_process_is_killed_in_turn(tmp_path: Path, staleness: str) -> None:
    overrides = (f"pacing.staleness={staleness}", "environment.harness=letters", "run.steps=27", TWO_RANKS)
    async with disturbed(TINY, tmp_path, f"kills-{staleness}", overrides) as run:
        await run.version_reached(1, wait_s=400)
        for target in TARGETS:
            version = run.version()
            await run.kill(target)
            await run.version_reached(version + 1, wait_s=400)
        summary = await ended_well(run, within_s=900)
    assert summary["steps"] == 27
    lineage_holds(run, summary, max_lag=1)


async def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    overrides = ("run.steps=6", "weights.store=nats")
    async with disturbed(TINY, tmp_path, "resumes", overrides) as run:
        await run.version_reached(2, wait_s=400)
    assert run.process.returncode == 130
    async with disturbed(TINY, tmp_path, "resumes", overrides) as run:
        summary = await ended_well(run, within_s=900)
    assert summary["steps"] == 6
    lineage_holds(run, summary, max_lag=1)
