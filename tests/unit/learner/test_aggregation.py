"""How much a token counts: published sums, and what an episode weighs that has branches."""

import pytest

from openforge.learner.aggregation import token_weights

LOSS_TOKENS, EPISODES = [3, 1, 0, 4], [0, 1, 2, 3]


def test_token_mean_weighs_each_token_of_the_step_alike() -> None:
    assert token_weights(LOSS_TOKENS, EPISODES, "token_mean") == [1 / 8, 1 / 8, 0.0, 1 / 8]


def test_sequence_mean_weighs_each_sequence_with_loss_alike() -> None:
    weights = token_weights(LOSS_TOKENS, EPISODES, "sequence_mean")
    assert [weight * tokens for weight, tokens in zip(weights, LOSS_TOKENS, strict=True)] == pytest.approx(
        [1 / 3, 1 / 3, 0.0, 1 / 3]
    )


def test_the_constant_of_dr_grpo_divides_every_episode_by_the_same() -> None:
    assert token_weights(LOSS_TOKENS, EPISODES, "constant", 50) == pytest.approx([1 / 150, 1 / 150, 0.0, 1 / 150])


def test_neither_length_nor_branches_change_what_an_episode_weighs_in_episode_mean() -> None:
    tokens, episodes = [100, 7, 50, 3, 1, 9], [0, 1, 1, 1, 2, 2]
    weights = token_weights(tokens, episodes, "episode_mean")
    share = [0.0, 0.0, 0.0]
    for weight, count, episode in zip(weights, tokens, episodes, strict=True):
        share[episode] += weight * count
    assert share == pytest.approx([1 / 3, 1 / 3, 1 / 3])
    assert len({weights[1], weights[2], weights[3]}) == 1


def test_an_episode_without_loss_tokens_is_no_episode_of_the_mean() -> None:
    assert token_weights([2, 0, 0], [0, 1, 1], "episode_mean") == [0.5, 0.0, 0.0]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "episode_mean", "constant"])
def test_a_step_without_loss_tokens_weighs_nothing(aggregation: str) -> None:
    assert token_weights([0, 0], [0, 1], aggregation, 5) == [0.0, 0.0]  # type: ignore[arg-type]
