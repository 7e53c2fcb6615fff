"""One run in numbers: how its rewards rose, how old what it trained was, and where its time went.

Promises: every figure is folded from the run's own streams, but for the CPU time and the load, which the machine says.
"""

import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from openforge.bus import CAUGHT_UP, Bus
from openforge.cli import children
from openforge.cli.bench.schedule import recorded
from openforge.cli.reach import bus_of
from openforge.protos import BatchTrained, TrajectoryRetired

WHY = ("ess", "ratio_mean", "ratio_capped", "kl_mean", "gap_mean", "grad_norm")
"""What a learner says of how far the policy has moved from whoever sampled, as means over its batches."""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """What was learned: `rewards` by batch, `metrics` as means over batches."""

    seed: int
    max_lag: int
    rewards: list[float]
    metrics: dict[str, float]


class Measured(Curve, frozen=True, kw_only=True):
    """A run of all services. `lag_mean` is over all loss tokens; `retired` counts verdicts that were not trained.

    `took_s`: from the first group to the last batch. `generation_s`: from a group's first request to its last verdict;
    `step_s`: computing a batch; `serve_s`: from its commit until an engine answers with it; each in the mean.
    `wall_s` and `cpu_s` are of the whole command with all its processes, `load` the machine's when it began and ended.
    """

    in_flight: int
    lag_mean: float
    lag_max: int
    episodes: int
    retired: int
    took_s: float
    generation_s: float
    step_s: float
    serve_s: float
    wall_s: float
    cpu_s: float
    load: tuple[float, float]


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Of the command that made a run."""

    wall_s: float
    cpu_s: float
    load: tuple[float, float]


def train(run_file: Path, overrides: Sequence[str]) -> Cost:
    """`openforge train` to its end."""
    began, cpu_s, load = time.monotonic(), _cpu_s(), os.getloadavg()[0]
    children.train(run_file, overrides)
    return Cost(wall_s=time.monotonic() - began, cpu_s=_cpu_s() - cpu_s, load=(load, os.getloadavg()[0]))


def _cpu_s() -> float:
    """Of all children that ended, theirs included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def measured(run: str, cost: Cost) -> Measured:
    """What the streams of a run that ended say."""
    async with bus_of(run) as bus:
        timed = await recorded(bus, run)
        batches, retired = await _batches(bus, run)
    tokens = sum(count.tokens for batch in batches for count in batch.lags)
    return Measured(
        seed=timed.config.run.seed,
        max_lag=timed.config.pacing.max_lag,
        in_flight=timed.config.pacing.in_flight,
        rewards=[batch.reward_mean for batch in batches],
        lag_mean=sum(count.lag * count.tokens for batch in batches for count in batch.lags) / max(1, tokens),
        lag_max=max(batch.lag for batch in batches),
        episodes=sum(len(batch.episodes) for batch in batches),
        retired=retired,
        took_s=timed.took_s,
        generation_s=fmean(max(members_s) for members_s in timed.groups_s.values()),
        step_s=fmean(timed.steps_s),
        serve_s=fmean(timed.serves_s),
        wall_s=cost.wall_s,
        cpu_s=cost.cpu_s,
        load=cost.load,
        metrics={name: fmean(batch.metrics.get(name, 0.0) for batch in batches) for name in WHY},
    )


async def _batches(bus: Bus, run: str) -> tuple[list[BatchTrained], int]:
    """The lineage in order, and how many verdicts are not in it."""
    batches: dict[int, BatchTrained] = {}
    retired = 0
    async for told in bus.follow(("policy",), run=run, until_now=True):
        if told is CAUGHT_UP:
            continue
        match told.fact:
            case BatchTrained() as fact:
                batches[fact.version] = fact
            case TrajectoryRetired():
                retired += 1
            case _:
                pass
    return [batches[version] for version in sorted(batches)], retired
