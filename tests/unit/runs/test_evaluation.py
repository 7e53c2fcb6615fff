"""Estimators against values worked out by hand and against simulation; tables against the trials they are made of."""

from itertools import combinations

import msgspec
import pytest

from openforge.runs.estimators import all_pass_plug_in, all_pass_unbiased, pass_at_k
from openforge.runs.evaluation import Evaluation, estimate, evaluated
from openforge.runs.trials import Trial


@pytest.mark.parametrize(
    ("passed", "at_least_one", "all_unbiased", "all_plug_in"),
    [(0, 0.0, 0.0, 0.0), (1, 1.0, 0.0, 1 / 27), (2, 1.0, 0.0, 8 / 27), (3, 1.0, 1.0, 1.0)],
)
def test_three_trials_give_the_published_values_of_pass_3(
    passed: int, at_least_one: float, all_unbiased: float, all_plug_in: float
) -> None:
    assert pass_at_k(3, passed, 3) == at_least_one
    assert all_pass_unbiased(3, passed, 3) == all_unbiased
    assert all_pass_plug_in(3, passed, 3) == pytest.approx(all_plug_in)


@pytest.mark.parametrize(("n", "c", "k"), [(10, 3, 5), (10, 3, 2), (6, 0, 2), (6, 6, 4), (5, 4, 2)])
def test_unbiased_estimators_are_the_shares_among_all_draws_without_replacement(n: int, c: int, k: int) -> None:
    draws = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    assert all_pass_unbiased(n, c, k) == pytest.approx(sum(map(all, draws)) / len(draws))


def test_fewer_trials_than_k_say_nothing() -> None:
    assert pass_at_k(2, 0, 3) is all_pass_unbiased(2, 2, 3) is all_pass_plug_in(2, 2, 3) is None


def trial(harness: str, instance: str, number: int, passed: bool | None) -> Trial:
    reward = None if passed is None else float(passed)
    return Trial(
        run="r",
        harness=harness,
        task=instance,
        seed=1,
        instance=instance,
        episode=f"{instance}-{number}",
        attempts=1,
        passed=passed,
        reward=reward,
        failed="sandbox_failed" if passed is None else "",
        ended="" if passed is None else "finished",
        version=None if passed is None else 4,
        metrics={} if passed is None else {"behaviour_tool_calls": 2.0 + number, "score": 1.0},
    )


def said(**rows: dict[str, list[bool | None]]) -> Evaluation:
    trials = {
        harness: [trial(harness, task, n, passed) for task, all_ in tasks.items() for n, passed in enumerate(all_)]
        for harness, tasks in rows.items()
    }
    return evaluated(
        trials,
        {harness: {"sandbox_failed": 3} for harness in trials},
        name="e",
        model="m",
        environment="shell",
        seed=7,
        trials_per_task=3,
        ks=(1, 3),
    )


def test_a_trial_without_a_verdict_lowers_n_and_is_counted_but_is_no_failure() -> None:
    whole = said(one={"a": [True, True, True], "b": [True, None, None]})
    result = whole.harnesses[0]
    passes = {one.estimator: one.estimate for one in result.passes}
    assert (result.trials, result.without_verdict, result.failures) == (6, 2, {"sandbox_failed": 2})
    assert (passes["pass@1 (unbiased)"].value, passes["pass@1 (unbiased)"].tasks) == (1.0, 2)
    assert (passes["pass^3 (unbiased)"].value, passes["pass^3 (unbiased)"].tasks) == (1.0, 1)
    assert result.failed_attempts == {"sandbox_failed": 3}


def test_one_trial_has_one_estimator_and_more_have_each_by_name() -> None:
    names = [one.estimator for one in said(one={"a": [True, False, True]}).harnesses[0].passes]
    assert names == ["pass@1 (unbiased)", "pass@3 (unbiased)", "pass^3 (unbiased)", "pass^3 (plug-in)"]


def test_harnesses_are_compared_on_the_tasks_that_both_have_verdicts_of() -> None:
    whole = said(one={"a": [False] * 3, "b": [True] * 3, "c": [None] * 3}, two={"a": [True] * 3, "c": [True] * 3})
    (difference,) = whole.differences
    assert (difference.harness, difference.than) == ("two", "one")
    assert (difference.estimate.value, difference.estimate.tasks) == (1.0, 1)


def test_behaviour_is_counted_by_weight_version() -> None:
    result = said(one={"a": [True, False, True]}).harnesses[0]
    assert result.behaviour == {"4": {"tool_calls": 3.0}}


def test_the_same_trials_and_seed_give_the_same_bytes() -> None:
    tasks: dict[str, list[bool | None]] = {str(n): [n % 3 == 0, n % 2 == 0, True] for n in range(9)}
    assert msgspec.json.encode(said(one=tasks)) == msgspec.json.encode(said(one=tasks))


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    import random

    rng, covered = random.Random(3), 0
    for _ in range(120):
        once = estimate([float(rng.random() < 0.4) for _ in range(50)], seed=1, draws=400)
        assert once.low is not None
        assert once.high is not None
        covered += once.low <= 0.4 <= once.high
    assert 105 <= covered <= 119


def test_nothing_is_said_of_no_task() -> None:
    assert estimate([], seed=0).value is None
