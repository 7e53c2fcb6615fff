"""Runs at each `max_lag` beside the synchronous runs of the same seeds.

Promises: pure; what is compared is paired by seed, so what a seed brings with it (the order of its tasks) cancels;
intervals are Student's at 95 %, over seeds.
"""

from collections.abc import Callable, Sequence
from math import exp, log, sqrt
from statistics import fmean, stdev
from typing import TypeVar

import msgspec

from openforge.cli.lags.measured import Curve, Measured

C = TypeVar("C", bound=Curve)

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""The 97.5 % quantile of Student's t for 1, 2, ... degrees of freedom."""


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over seeds with the 95 % interval; of a single seed all three are the same and say nothing."""

    mean: float
    low: float
    high: float


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """What was learned at one `max_lag`. `whole` is the mean reward over all steps, the area under the curve, `end`
    that of the last fifth; `whole_more` and `end_more` are by how much they are above the synchronous runs.
    """

    max_lag: int
    seeds: int
    whole: Interval
    end: Interval
    whole_more: Interval
    end_more: Interval
    metrics: dict[str, float]


class Lag(Learned, frozen=True, kw_only=True):
    """With what it took. `speed`: the time of the synchronous run over this one's; `overlap` and `bound`: the most that
    the functions of these names allow.
    """

    lag_mean: float
    lag_max: int
    retired_share: float
    speed: Interval
    overlap: float
    bound: float


def learned(curves: Sequence[Curve]) -> list[Learned]:
    """A row for each `max_lag`; only seeds that ran at all of them."""
    paired = _paired(curves)
    return [_learned(paired[0], paired[max_lag]) for max_lag in paired]


def compared(runs: Sequence[Measured], cores: int) -> list[Lag]:
    """As `learned`, with what the runs took."""
    paired = _paired(runs)
    return [_lag(paired[0], paired[max_lag], cores) for max_lag in paired]


def _paired(curves: Sequence[C]) -> dict[int, list[C]]:
    """By `max_lag`, in the order of the same seeds."""
    lags = sorted({curve.max_lag for curve in curves})
    by_seed: dict[int, dict[int, C]] = {}
    for curve in curves:
        by_seed.setdefault(curve.seed, {})[curve.max_lag] = curve
    complete = [found for _, found in sorted(by_seed.items()) if sorted(found) == lags]
    return {lag: [found[lag] for found in complete] for lag in lags}


def _learned(sync: Sequence[Curve], curves: Sequence[Curve]) -> Learned:
    def more(of: Callable[[Curve], float]) -> Interval:
        return interval([of(curve) - of(base) for curve, base in zip(curves, sync, strict=True)])

    return Learned(
        max_lag=curves[0].max_lag,
        seeds=len(curves),
        whole=interval([whole(curve) for curve in curves]),
        end=interval([end(curve) for curve in curves]),
        whole_more=more(whole),
        end_more=more(end),
        metrics={name: fmean(curve.metrics[name] for curve in curves) for name in curves[0].metrics},
    )


def _lag(sync: Sequence[Measured], runs: Sequence[Measured], cores: int) -> Lag:
    speed = interval([log(base.took_s / run.took_s) for run, base in zip(runs, sync, strict=True)])
    return Lag(
        **msgspec.structs.asdict(_learned(sync, runs)),
        lag_mean=fmean(run.lag_mean for run in runs),
        lag_max=max(run.lag_max for run in runs),
        retired_share=sum(run.retired for run in runs) / sum(run.retired + run.episodes for run in runs),
        speed=Interval(mean=exp(speed.mean), low=exp(speed.low), high=exp(speed.high)),
        overlap=fmean(overlap(base) for base in sync) if runs[0].max_lag else 1.0,
        bound=fmean(bound(base, cores) for base in sync) if runs[0].max_lag else 1.0,
    )


def whole(curve: Curve) -> float:
    return fmean(curve.rewards)


def end(curve: Curve) -> float:
    return fmean(curve.rewards[-max(1, len(curve.rewards) // 5) :])


def overlap(sync: Measured) -> float:
    """How many times as fast as this synchronous run it would be to generate and to train at once, both as slowly as
    they were one after the other: all that asynchrony alone can give, with no more in flight."""
    trained_s = len(sync.rewards) * (sync.step_s + sync.serve_s)
    return sync.took_s / max(trained_s, sync.took_s - trained_s)


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
