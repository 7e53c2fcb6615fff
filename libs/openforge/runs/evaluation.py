"""What trials say of harnesses: pass@k and pass^k with intervals, failures by cause, behaviour, differences.

Promises: tasks are the sampling unit, so intervals are percentile bootstraps over drawn tasks; a trial without a
verdict lowers n of its task and is counted, it is no failure; the same trials and seed give the same numbers.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from openforge.runs.estimators import ESTIMATORS
from openforge.runs.summary import BOOTSTRAP_DRAWS, mean
from openforge.runs.trials import Trial

BEHAVIOUR = "behaviour_"


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over `tasks` tasks and its 95 % interval; all None where no task can say anything."""

    value: float | None
    low: float | None
    high: float | None
    tasks: int


class PassK(msgspec.Struct, frozen=True, kw_only=True):
    estimator: str
    k: int
    estimate: Estimate


class HarnessResult(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table. `without_verdict` trials are not in n; `failed_attempts` counts those tried again too.

    `behaviour` is by weight version: the means of the verifier's `behaviour_*` counts over the trials that have them.
    """

    harness: str
    tasks: int
    trials: int
    without_verdict: int
    reward: Estimate
    passes: tuple[PassK, ...]
    ends: dict[str, int]
    failures: dict[str, int]
    failed_attempts: dict[str, int]
    behaviour: dict[str, dict[str, float]]
    sampled_tokens_mean: float
    turns_mean: float


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Success of `harness` minus that of `than`, over the tasks that both have verdicts of: a paired bootstrap."""

    harness: str
    than: str
    estimate: Estimate


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """`eval.json`."""

    name: str
    model: str
    environment: str
    seed: int
    trials_per_task: int
    interval: str
    harnesses: tuple[HarnessResult, ...]
    differences: tuple[Difference, ...]


INTERVAL = f"95 %, percentile bootstrap over tasks, {BOOTSTRAP_DRAWS} draws, seed of the run"


def evaluated(
    trials: Mapping[str, Sequence[Trial]],
    failed_attempts: Mapping[str, Mapping[str, int]],
    *,
    name: str,
    model: str,
    environment: str,
    seed: int,
    trials_per_task: int,
    ks: Sequence[int],
) -> Evaluation:
    """`trials` and `failed_attempts` by harness."""
    results = [_result(harness, rows, failed_attempts.get(harness, {}), ks, seed) for harness, rows in trials.items()]
    first, *others = trials
    return Evaluation(
        name=name,
        model=model,
        environment=environment,
        seed=seed,
        trials_per_task=trials_per_task,
        interval=INTERVAL,
        harnesses=tuple(results),
        differences=tuple(_difference(other, first, trials[other], trials[first], seed) for other in others),
    )


def _result(
    harness: str, rows: Sequence[Trial], failed_attempts: Mapping[str, int], ks: Sequence[int], seed: int
) -> HarnessResult:
    judged = [row for row in rows if row.passed is not None]
    by_task = _by_task(judged)
    return HarnessResult(
        harness=harness,
        tasks=len({row.instance for row in rows}),
        trials=len(rows),
        without_verdict=len(rows) - len(judged),
        reward=estimate([mean([row.reward or 0.0 for row in task]) for task in by_task.values()], seed),
        passes=tuple(_pass_k(name, k, by_task, seed) for k in ks for name in estimators_of(k)),
        ends=dict(sorted(Counter(row.ended for row in judged).items())),
        failures=dict(sorted(Counter(row.failed for row in rows if row.failed).items())),
        failed_attempts=dict(failed_attempts),
        behaviour=_behaviour(judged),
        sampled_tokens_mean=mean([row.sampled_tokens for row in judged]),
        turns_mean=mean([row.turns for row in judged]),
    )


def estimators_of(k: int) -> list[str]:
    """One trial passes or does not: all estimators agree for k = 1, so one is shown."""
    return [*ESTIMATORS][:1] if k == 1 else [*ESTIMATORS]


def _pass_k(name: str, k: int, by_task: Mapping[str, Sequence[Trial]], seed: int) -> PassK:
    said = [ESTIMATORS[name](len(rows), _passed(rows), k) for rows in by_task.values()]
    known = [value for value in said if value is not None]
    return PassK(estimator=name.replace("k", str(k), 1), k=k, estimate=estimate(known, seed))


def _difference(harness: str, than: str, mine: Sequence[Trial], theirs: Sequence[Trial], seed: int) -> Difference:
    left, right = _success(mine), _success(theirs)
    both = sorted(left.keys() & right.keys())
    return Difference(harness=harness, than=than, estimate=estimate([left[t] - right[t] for t in both], seed))


def _success(rows: Sequence[Trial]) -> dict[str, float]:
    by_task = _by_task([row for row in rows if row.passed is not None])
    return {task: _passed(judged) / len(judged) for task, judged in by_task.items()}


def _behaviour(rows: Sequence[Trial]) -> dict[str, dict[str, float]]:
    names = sorted({name for row in rows for name in row.metrics if name.startswith(BEHAVIOUR)})
    versions = sorted({row.version for row in rows}, key=lambda version: -1 if version is None else version)
    return {
        "unknown" if version is None else str(version): {
            name.removeprefix(BEHAVIOUR): mean(counts)
            for name in names
            if (counts := [row.metrics[name] for row in rows if row.version == version and name in row.metrics])
        }
        for version in versions
    }


def _by_task(rows: Iterable[Trial]) -> dict[str, list[Trial]]:
    by_task: dict[str, list[Trial]] = {}
    for row in rows:
        by_task.setdefault(row.instance, []).append(row)
    return by_task


def _passed(rows: Sequence[Trial]) -> int:
    return sum(row.passed is True for row in rows)


def estimate(values: Sequence[float], seed: int, draws: int = BOOTSTRAP_DRAWS) -> Estimate:
    """The mean of one value for each task, and where it would lie for other tasks of the same kind."""
    if not values:
        return Estimate(value=None, low=None, high=None, tasks=0)
    draw: Callable[[], list[float]] = _drawer(values, seed)
    means = sorted(mean(draw()) for _ in range(draws))
    return Estimate(
        value=mean(values), low=means[int(0.025 * draws)], high=means[int(0.975 * draws)], tasks=len(values)
    )


def _drawer(values: Sequence[float], seed: int) -> Callable[[], list[float]]:
    rng = random.Random(seed)
    return lambda: rng.choices(values, k=len(values))
