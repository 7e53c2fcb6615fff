"""Losses against their formulas, written out token by token in float64, with gradients."""

import math

import pytest
import torch

from openforge.learner.loss import ppo_clip, reinforce_is, token_weights

N = 200


@pytest.fixture
def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mu = -torch.rand(N, generator=generator, dtype=torch.float64) * 3 - 0.01
    logprobs = (mu + torch.randn(N, generator=generator, dtype=torch.float64)).clamp(max=-1e-3)
    advantages = torch.randn(N, generator=generator, dtype=torch.float64)
    advantages[::7] = 0.0
    return logprobs.requires_grad_(), mu, advantages


def test_reinforce_is_is_its_formula_and_the_weight_has_no_gradient(
    tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    logprobs, mu, advantages = tokens
    loss = reinforce_is(logprobs, mu, advantages, 2.0)
    loss.sum().backward()
    for n in range(N):
        weight = min(math.exp(logprobs[n].item() - mu[n].item()), 2.0)
        assert loss[n].item() == pytest.approx(-weight * advantages[n].item() * logprobs[n].item(), abs=1e-12)
        assert logprobs.grad[n].item() == pytest.approx(-weight * advantages[n].item(), abs=1e-12)


def test_ppo_clip_is_its_formula_with_two_bounds(tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    logprobs, mu, advantages = tokens
    loss = ppo_clip(logprobs, mu, advantages, 0.2, 0.28)
    loss.sum().backward()
    for n in range(N):
        ratio, advantage = math.exp(logprobs[n].item() - mu[n].item()), advantages[n].item()
        clipped = min(max(ratio, 0.8), 1.28)
        assert loss[n].item() == pytest.approx(max(-advantage * ratio, -advantage * clipped), abs=1e-12)
        free = advantage * ratio <= advantage * clipped
        expected = -advantage * ratio if free else 0.0
        assert logprobs.grad[n].item() == pytest.approx(expected, abs=1e-12)


def test_on_policy_both_have_the_policy_gradient() -> None:
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    for loss_of in (
        lambda p, m: reinforce_is(p, m, advantages, 2.0),
        lambda p, m: ppo_clip(p, m, advantages, 0.2, 0.28),
    ):
        logprobs = torch.tensor([-1.0, -0.2, -3.0], dtype=torch.float64, requires_grad=True)
        loss_of(logprobs, logprobs.detach()).sum().backward()
        assert torch.equal(logprobs.grad, -advantages)


def test_extreme_ratios_stay_finite() -> None:
    logprobs = torch.tensor([-0.001, -1000.0], requires_grad=True)
    mu = torch.tensor([-1000.0, -0.001])
    for loss in (
        reinforce_is(logprobs, mu, torch.ones(2), 2.0),
        ppo_clip(logprobs, mu, -torch.ones(2), 0.2, 0.28),
    ):
        assert torch.isfinite(loss).all()


def test_token_mean_weighs_each_token_of_the_step_alike() -> None:
    assert token_weights([3, 1, 0, 4], "token_mean") == [1 / 8, 1 / 8, 0.0, 1 / 8]


def test_sequence_mean_weighs_each_sequence_with_loss_alike() -> None:
    weights = token_weights([3, 1, 0, 4], "sequence_mean")
    assert [weight * tokens for weight, tokens in zip(weights, [3, 1, 0, 4], strict=True)] == pytest.approx(
        [1 / 3, 1 / 3, 0.0, 1 / 3]
    )


def test_a_step_without_loss_tokens_weighs_nothing() -> None:
    assert token_weights([0, 0], "token_mean") == [0.0, 0.0]
    assert token_weights([0, 0], "sequence_mean") == [0.0, 0.0]
