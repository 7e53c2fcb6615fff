import math
import random
import statistics

import pytest
import reference_losses as reference

from openforge.learner.advantage import advantages, batch_advantages, gae, overlong_penalty, whitened

ESTIMATORS = ("grpo", "dr_grpo", "rloo", "maxrl")


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


def test_maxrl_divides_by_the_mean() -> None:
    assert advantages([0.0, 1.0, 1.0, 1.0], "maxrl") == pytest.approx([-1.0, 1 / 3, 1 / 3, 1 / 3])


def test_maxrl_has_nothing_to_say_where_the_mean_is_not_above_zero() -> None:
    assert advantages([-1.0, 0.0], "maxrl") == [0.0, 0.0]


def test_groups_are_compared_one_by_one_whatever_their_sizes() -> None:
    rewards_E = [0.0, 1.0, 1.0, 0.0, 0.5]
    found = batch_advantages(rewards_E, [9, 1, 4, 2, 2], [2, 3], "grpo")
    assert found == [*advantages(rewards_E[:2], "grpo"), *advantages(rewards_E[2:], "grpo")]


def test_the_deviation_of_the_batch_is_over_all_its_rewards() -> None:
    rewards_E = [0.0, 1.0, 0.2, 0.4]
    deviation = statistics.stdev(rewards_E) + 1e-4
    expected = [one / deviation for one in (-0.5, 0.5, -0.1, 0.1)]
    assert batch_advantages(rewards_E, [1, 1, 1, 1], [2, 2], "grpo_batch_std", 1e-4) == pytest.approx(expected)


def test_reinforce_pp_whitens_over_the_tokens_of_the_batch() -> None:
    rewards_E, tokens_E = [0.0, 1.0, 0.5], [1, 3, 2]
    tokens = [reward for reward, count in zip(rewards_E, tokens_E, strict=True) for _ in range(count)]
    mean, deviation = statistics.fmean(tokens), math.sqrt(statistics.variance(tokens) + 1e-8)
    expected = [(reward - mean) / deviation for reward in rewards_E]
    assert batch_advantages(rewards_E, tokens_E, [3], "reinforce_pp") == pytest.approx(expected)


def test_reinforce_pp_with_a_baseline_takes_the_mean_of_the_group_first() -> None:
    rewards_E, tokens_E = [0.0, 1.0, 5.0, 5.5], [1, 3, 2, 2]
    assert batch_advantages(rewards_E, tokens_E, [2, 2], "reinforce_pp_baseline") == pytest.approx(
        whitened([-0.5, 0.5, -0.25, 0.25], tokens_E)
    )


@pytest.mark.parametrize("estimator", ["grpo_batch_std", "reinforce_pp", "reinforce_pp_baseline"])
def test_a_batch_of_equal_rewards_has_exactly_no_advantage(estimator: str) -> None:
    assert batch_advantages([0.1] * 4, [1, 2, 3, 4], [2, 2], estimator) == [0.0] * 4  # type: ignore[arg-type]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (1.0, 0.0)])
def test_gae_is_the_sum_of_discounted_surprises(gamma: float, lam: float) -> None:
    rng = random.Random(1)
    values_K = [rng.gauss(0, 1) for _ in range(23)]
    advantages_K, returns_K = gae(values_K, 0.7, gamma, lam)
    assert advantages_K == pytest.approx(reference.gae(values_K, 0.7, gamma, lam), abs=1e-12)
    assert returns_K == pytest.approx([a + v for a, v in zip(advantages_K, values_K, strict=True)])


def test_gae_without_discount_compares_with_what_came_in_the_end() -> None:
    assert gae([0.2, 0.5, 0.9], 1.0, 1.0, 1.0)[0] == pytest.approx([0.8, 0.5, 0.1])


def test_gae_of_nothing_is_nothing() -> None:
    assert gae([], 1.0, 1.0, 1.0) == ([], [])


def test_an_answer_that_is_too_long_loses_linearly_and_at_most_the_penalty() -> None:
    assert [overlong_penalty(tokens, 100, 20) for tokens in (0, 80, 85, 90, 100, 1000)] == pytest.approx(
        [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    )
    assert overlong_penalty(90, 100, 20, 0.5) == pytest.approx(-0.25)
    assert overlong_penalty(101, 100, 0) == -1.0
    assert overlong_penalty(10_000, 0, 0) == 0.0
