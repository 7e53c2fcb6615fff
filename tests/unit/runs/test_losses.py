"""The alarm rings where loss depends on something, and seldom where it does not."""

import random

import pytest

from openforge.runs.losses import (
    ALARM_P,
    Slot,
    chi_squared,
    completion_weights,
    dependence,
    dependences,
    length_bin,
    quartiles,
)


def slot(task: str, tokens: int, lost: bool, harness: str = "one") -> Slot:
    return Slot(task=task, harness=harness, tokens=tokens, lost=lost)


def test_the_statistic_is_that_of_a_table_worked_out_by_hand() -> None:
    # kept 30, 10; lost 10, 30: each cell is 20 expected, so 4 * 10^2 / 20
    assert chi_squared({"a": 40, "b": 40}, {"a": 10, "b": 30}) == pytest.approx(20.0)
    assert chi_squared({"a": 40, "b": 40}, {}) == 0.0


def test_loss_that_depends_on_the_task_alone_rings_for_the_task_alone() -> None:
    rng = random.Random(5)
    slots = [
        slot(task, rng.randrange(100), rng.random() < (0.3 if task == "hard" else 0.02), rng.choice(["one", "two"]))
        for task in ("hard", "easy", "plain")
        for _ in range(80)
    ]
    by_task, by_harness, by_length = dependences(slots)
    assert (by_task.alarm, by_harness.alarm, by_length.alarm) == (True, False, False)
    assert "loss depends on task" in by_task.sentence()
    assert "most at hard" in by_task.sentence()


def test_loss_of_long_episodes_rings_for_length() -> None:
    rng = random.Random(6)
    slots = [slot("a", tokens, rng.random() < tokens / 400) for tokens in range(0, 200, 1)]
    _, by_harness, by_length = dependences(slots)
    assert by_length.alarm
    assert not by_harness.alarm


def test_even_loss_rings_about_as_seldom_as_the_level_says() -> None:
    rng, rung = random.Random(7), 0
    for seed in range(60):
        strata = [rng.choice("abcd") for _ in range(60)]
        rung += dependence("task", strata, [rng.random() < 0.1 for _ in strata], seed).p_value < 0.1
    assert rung <= 14  # 6 expected at the level 0.1; 14 has a chance below 0.002
    assert ALARM_P < 0.1


def test_nothing_lost_is_no_alarm_and_no_weights_but_one() -> None:
    (by_task, *_) = dependences([slot("a", 3, False), slot("b", 9, False)])
    assert (by_task.p_value, by_task.alarm, by_task.weights) == (1.0, False, {"a": 1.0, "b": 1.0})
    assert by_task.effective == 2.0
    assert dependences([]) == ()


def test_weights_bring_the_kept_back_to_what_was_started() -> None:
    started, kept = {"a": 40, "b": 40}, {"a": 40, "b": 10}
    weights = completion_weights(started, kept)
    assert kept["a"] * weights["a"] == pytest.approx(kept["b"] * weights["b"])
    assert sum(kept[name] * weights[name] for name in kept) == pytest.approx(50)


def test_a_weight_is_bounded_and_a_stratum_without_anything_kept_has_none() -> None:
    weights = completion_weights({"a": 100, "b": 100, "c": 100}, {"a": 100, "b": 1, "c": 0})
    assert set(weights) == {"a", "b"}
    assert weights["b"] / weights["a"] == pytest.approx(10)


def test_every_length_has_one_bin() -> None:
    cuts = quartiles(range(100))
    assert [length_bin(tokens, cuts) for tokens in (0, 25, 49, 75, 200)] == [
        "below 25",
        "25 to 50",
        "25 to 50",
        "from 75",
        "from 75",
    ]
    assert length_bin(7, quartiles([7, 7, 7])) == "from 7"
