"""Runs at each `max_lag` beside the synchronous runs of the same seeds.

Promises: pure; what is compared is paired by seed, so what a seed brings with it (the order of its tasks) cancels;
intervals are Student's at 95 %, over seeds.
"""

from collections.abc import Callable, Sequence
from math import exp, log, sqrt
from statistics import fmean, stdev

import msgspec

from openforge.cli.lags.measured import Measured

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""The 97.5 % quantile of Student's t for 1, 2, ... degrees of freedom."""


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over seeds with the 95 % interval; of a single seed all three are the same and say nothing."""

    mean: float
    low: float
    high: float


class Lag(msgspec.Struct, frozen=True, kw_only=True):
    """All runs at one `max_lag`. Rewards are differences to the synchronous run of the same seed: `curve` over all
    steps, `end` over the last fifth. `speed`: the time that run took over this one's; `bound`: the most that can be.
    """

    max_lag: int
    seeds: int
    lag_mean: float
    lag_max: int
    retired_share: float
    reward: Interval
    reward_end: Interval
    curve: Interval
    end: Interval
    speed: Interval
    bound: float
    metrics: dict[str, float]

    @property
    def no_worse(self) -> bool:
        """Nothing in the interval says that it learned less."""
        return self.curve.high >= 0 and self.end.high >= 0


def compared(runs: Sequence[Measured], cores: int) -> list[Lag]:
    """A row for each `max_lag`; only seeds of which all of them ran."""
    lags = sorted({run.max_lag for run in runs})
    by_seed = {
        seed: {run.max_lag: run for run in runs if run.seed == seed} for seed in sorted({run.seed for run in runs})
    }
    complete = [found for found in by_seed.values() if sorted(found) == lags]
    return [_lag([found[0] for found in complete], [found[lag] for found in complete], cores) for lag in lags]


def _lag(sync: Sequence[Measured], runs: Sequence[Measured], cores: int) -> Lag:
    def difference(of: Callable[[Measured], float]) -> Interval:
        return interval([of(run) - of(base) for run, base in zip(runs, sync, strict=True)])

    speed = interval([log(base.took_s / run.took_s) for run, base in zip(runs, sync, strict=True)])
    return Lag(
        max_lag=runs[0].max_lag,
        seeds=len(runs),
        lag_mean=fmean(run.lag_mean for run in runs),
        lag_max=max(run.lag_max for run in runs),
        retired_share=sum(run.retired for run in runs) / sum(run.retired + run.episodes for run in runs),
        reward=interval([whole(run) for run in runs]),
        reward_end=interval([end(run) for run in runs]),
        curve=difference(whole),
        end=difference(end),
        speed=Interval(mean=exp(speed.mean), low=exp(speed.low), high=exp(speed.high)),
        bound=fmean(bound(base, cores) for base in sync) if runs[0].max_lag else 1.0,
        metrics={name: fmean(run.metrics[name] for run in runs) for name in runs[0].metrics},
    )


def whole(run: Measured) -> float:
    """The mean reward over all steps, which is the area under the curve."""
    return fmean(run.rewards)


def end(run: Measured) -> float:
    return fmean(run.rewards[-max(1, len(run.rewards) // 5) :])


def bound(sync: Measured, cores: int) -> float:
    """How many times as fast as this synchronous run no run of the same work can be, on this machine by itself.

    Batches follow one another, so a step takes at least as long as computing it and serving its weights; and the work
    of all processes takes at least its CPU time on all cores.
    """
    steps = len(sync.rewards)
    least_s = max(steps * (sync.step_s + sync.serve_s), sync.cpu_s / sync.wall_s * sync.took_s / cores)
    return sync.took_s / least_s


def interval(values: Sequence[float]) -> Interval:
    mean = fmean(values)
    if len(values) < 2:
        return Interval(mean=mean, low=mean, high=mean)
    half = STUDENT[min(len(values) - 1, len(STUDENT)) - 1] * stdev(values) / sqrt(len(values))
    return Interval(mean=mean, low=mean - half, high=mean + half)
