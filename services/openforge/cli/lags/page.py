"""The comparison as curves and as a table."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev

import matplotlib

from openforge.cli.lags.compare import Interval, Lag, Learned
from openforge.cli.lags.measured import Curve

matplotlib.use("svg")

LEARNED = (
    "max_lag",
    "mean reward",
    "more than sync",
    "last fifth",
    "more than sync",
    "effective sample",
    "mean log mu - log pi",
    "truncated",
)
TOOK = ("lag seen, mean (max)", "retired", "times as fast as sync", "by overlap alone", "bound")


def learned_table(rows: Sequence[Learned]) -> list[str]:
    """Markdown."""
    return _markdown(LEARNED, map(_learned, rows))


def table(lags: Sequence[Lag]) -> list[str]:
    """Markdown."""
    return _markdown((*LEARNED, *TOOK), ((*_learned(lag), *_took(lag)) for lag in lags))


def _markdown(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]


def _learned(row: Learned) -> tuple[str, ...]:
    alone = row.max_lag == 0
    return (
        str(row.max_lag),
        f"{row.whole.mean:.3f}",
        "" if alone else _difference(row.whole_more),
        f"{row.end.mean:.3f}",
        "" if alone else _difference(row.end_more),
        f"{row.metrics['ess']:.3f}",
        f"{row.metrics['kl_mean']:z.4f}",
        f"{row.metrics['ratio_capped']:.1%}",
    )


def _took(lag: Lag) -> tuple[str, ...]:
    alone = lag.max_lag == 0
    return (
        f"{lag.lag_mean:.2f} ({lag.lag_max})",
        f"{lag.retired_share:.1%}",
        "" if alone else f"{lag.speed.mean:.2f} ({lag.speed.low:.2f} to {lag.speed.high:.2f})",
        "" if alone else f"{lag.overlap:.2f}",
        "" if alone else f"{lag.bound:.2f}",
    )


def _difference(interval: Interval) -> str:
    return f"{interval.mean:+.3f} ({interval.low:+.3f} to {interval.high:+.3f})"


def draw(runs: Sequence[Curve], path: Path) -> None:
    """Reward by step: the mean over seeds at each `max_lag`, with one standard deviation."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    for max_lag in sorted({run.max_lag for run in runs}):
        curves = [run.rewards for run in runs if run.max_lag == max_lag]
        columns = list(zip(*curves, strict=True))
        steps = range(1, len(columns) + 1)
        means = [fmean(column) for column in columns]
        axes.plot(steps, means, marker=".", label="synchronous" if max_lag == 0 else f"max_lag {max_lag}")
        if len(curves) > 1:
            spread = [stdev(column) for column in columns]
            low, high = zip(*((mean - sd, mean + sd) for mean, sd in zip(means, spread, strict=True)), strict=True)
            axes.fill_between(steps, low, high, alpha=0.12)
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.05))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
