import math

import pytest

from openforge.learner.advantage import advantages

ESTIMATORS = ("grpo", "dr_grpo", "rloo")


def test_grpo_divides_by_the_unbiased_deviation_plus_eps() -> None:
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert advantages([0, 1, 1, 0], "grpo", 1e-6) == pytest.approx(
        [-expected, expected, expected, -expected], rel=1e-12
    )


def test_grpo_eps_is_a_setting() -> None:
    assert advantages([0, 1], "grpo", 1.0)[1] == pytest.approx(0.5 / (math.sqrt(0.5) + 1.0))


def test_dr_grpo_only_centres() -> None:
    assert advantages([0, 1, 1, 0], "dr_grpo") == [-0.5, 0.5, 0.5, -0.5]


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    rewards_G = [0.0, 1.0, 0.5, 0.25, 1.0]
    expected = [reward - (sum(rewards_G) - reward) / 4 for reward in rewards_G]
    assert advantages(rewards_G, "rloo") == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_groups_of_any_size_are_centred(estimator: str) -> None:
    for rewards_G in ([0.0, 1.0], [1.0, 0.0, 0.0], [0.1, 0.7, 0.7, 0.2, 0.9, 0.3, 1.0]):
        assert sum(advantages(rewards_G, estimator)) == pytest.approx(0.0, abs=1e-9)  # type: ignore[arg-type]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_single_member_is_never_better_than_itself(estimator: str) -> None:
    assert advantages([0.7], estimator) == [0.0]  # type: ignore[arg-type]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_rewards_have_exactly_no_advantage(estimator: str) -> None:
    assert advantages([0.1] * 7, estimator) == [0.0] * 7  # type: ignore[arg-type]
