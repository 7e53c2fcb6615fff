"""Advantages, losses and weights against the functions of verl 0.9.1, in float64, with gradients."""

from typing import Any

import numpy
import pytest
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import ActorConfig

from openforge.learner import loss
from openforge.learner.advantage import batch_advantages, gae
from openforge.learner.aggregation import token_weights
from openforge.learner.objective import LossTokens, token_losses
from openforge.runs.config import AlgorithmSection

B, T = 6, 17
AGGREGATIONS = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "constant": "seq-mean-token-sum",  # with a horizon of 1: what verl's "norm" divides by differs between releases
}


class Padded:
    """B ragged rows with a hole of tool tokens in the middle of some, as verl sees them and as we do."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(scale: float) -> torch.Tensor:
            return scale * torch.randn(B, T, generator=generator, dtype=torch.float64)

        self.old = -2 * torch.rand(B, T, generator=generator, dtype=torch.float64) - 0.01
        self.new = (self.old + normal(0.5)).clamp(max=-1e-3)
        self.mu = self.old + normal(0.4)
        self.mask = torch.zeros(B, T, dtype=torch.float64)
        for row, length in enumerate((17, 3, 9, 1, 12, 8)):
            self.mask[row, :length] = 1
        self.mask[0, 5:9] = 0
        self.mask[4, 2:4] = 0
        self.rewards = [1.0, 0.0, 0.0, 1.0, 1.0, 0.25]
        self.groups = [3, 3]
        self.index = numpy.array(["a", "a", "a", "b", "b", "b"])
        self.kept = self.mask.bool()
        self.sequence_N = torch.arange(B)[:, None].expand(B, T)[self.kept]
        self.tokens = [int(count) for count in self.mask.sum(1)]

    def spread_rewards(self) -> torch.Tensor:
        """The scalar stands at the last token."""
        spread = torch.zeros(B, T, dtype=torch.float64)
        for row in range(B):
            spread[row, int(self.kept[row].nonzero()[-1])] = self.rewards[row]
        return spread


def actor(**more: Any) -> ActorConfig:
    return ActorConfig(strategy="fsdp2", rollout_n=3, ppo_micro_batch_size_per_gpu=1, **more)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("grpo", lambda p: core_algos.compute_grpo_outcome_advantage(p.spread_rewards(), p.mask, p.index)),
        (
            "dr_grpo",
            lambda p: core_algos.compute_grpo_outcome_advantage(
                p.spread_rewards(), p.mask, p.index, norm_adv_by_std_in_grpo=False
            ),
        ),
        ("rloo", lambda p: core_algos.compute_rloo_outcome_advantage(p.spread_rewards(), p.mask, p.index)),
        (
            "reinforce_pp",
            lambda p: core_algos.compute_reinforce_plus_plus_outcome_advantage(
                p.spread_rewards(), p.mask, config=AlgoConfig(gamma=1.0)
            ),
        ),
        (
            "reinforce_pp_baseline",
            lambda p: core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
                p.spread_rewards(), p.mask, p.index
            ),
        ),
    ],
)
def test_advantages_are_those_of_verl(ours: Any, theirs: Any) -> None:
    padded = Padded()
    expected = theirs(padded)[0]
    found = batch_advantages(padded.rewards, padded.tokens, padded.groups, ours)
    for row in range(B):
        assert expected[row][padded.kept[row]].tolist() == pytest.approx([found[row]] * padded.tokens[row], abs=1e-6)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.97, 0.9)])
def test_returns_of_gae_are_those_of_verl(gamma: float, lam: float) -> None:
    padded = Padded()
    values = torch.randn(B, T, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    _, returns = core_algos.compute_gae_advantage_return(
        padded.spread_rewards(), values, padded.mask, torch.tensor(gamma), torch.tensor(lam)
    )
    for row in range(B):
        kept = padded.kept[row]
        _, ours = gae(values[row][kept].tolist(), padded.rewards[row], gamma, lam)
        assert returns[row][kept].tolist() == pytest.approx(ours, abs=1e-6)


LOSSES: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"loss": "ppo_clip", "dual_clip": 3.0}, "vanilla", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}),
    (
        {"loss": "gspo", "clip_low": 3e-2, "clip_high": 4e-2, "aggregation": "sequence_mean"},
        "gspo",
        {"clip_ratio_low": 3e-2, "clip_ratio_high": 4e-2},
    ),
    ({"loss": "cispo"}, "cispo", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}),
    (
        {"loss": "dppo_tv", "ratio_cap": 20.0},
        "dppo_tv",
        {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 20.0},
    ),
]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("settings", "name", "more"), LOSSES, ids=[name for _, name, _ in LOSSES])
def test_losses_and_gradients_are_those_of_verl(
    settings: dict[str, Any], name: str, more: dict[str, Any], aggregation: str
) -> None:
    padded, advantages = Padded(1), torch.randn(B, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    if name == "gspo" and aggregation != "sequence_mean":
        aggregation = "sequence_mean"  # verl's own choice whatever is asked
    theirs = padded.new.clone().requires_grad_()
    expected = core_algos.get_policy_loss_fn(name)(
        old_log_prob=padded.old,
        log_prob=theirs,
        advantages=advantages.expand(B, T),
        response_mask=padded.mask,
        loss_agg_mode=AGGREGATIONS[aggregation],
        config=actor(**more),
    )[0]
    expected.backward()

    algorithm = AlgorithmSection(**{**settings, "aggregation": aggregation})
    weights = token_weights(padded.tokens, range(B), aggregation, 1)  # type: ignore[arg-type]
    ours = padded.new[padded.kept].clone().requires_grad_()
    tokens = LossTokens(ours, padded.old[padded.kept], advantages[padded.sequence_N, 0], padded.sequence_N)
    found = (torch.tensor(weights, dtype=torch.float64)[padded.sequence_N] * token_losses(algorithm, tokens)).sum()
    found.backward()
    assert found.item() == pytest.approx(expected.item(), abs=1e-6)
    assert ours.grad.tolist() == pytest.approx(theirs.grad[padded.kept].tolist(), abs=1e-6)


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_truncated_weights_are_those_of_verl(kind: str) -> None:
    padded = Padded(4)
    log_rho = padded.old - padded.mu
    expected = compute_rollout_correction_weights(
        log_ratio=log_rho, response_mask=padded.mask, rollout_is=kind, rollout_is_threshold=2.0
    )[0]
    kept = log_rho[padded.kept]
    ours = loss.token_tis(kept, 2.0) if kind == "token" else loss.sequence_tis(kept, padded.sequence_N, 2.0)
    assert ours.tolist() == pytest.approx(expected[padded.kept].tolist(), abs=1e-6)


def test_icepop_is_that_of_verl() -> None:
    padded = Padded(4)
    log_rho = padded.old - padded.mu
    expected = compute_rollout_correction_weights(
        log_ratio=log_rho, response_mask=padded.mask, rollout_is="token", rollout_is_threshold="0.5_2.0"
    )[0]
    assert loss.icepop(log_rho[padded.kept], 0.5, 2.0).tolist() == pytest.approx(
        expected[padded.kept].tolist(), abs=1e-6
    )


@pytest.mark.parametrize(("ours", "theirs"), [("k1", "k1"), ("k2", "k2"), ("k3", "k3"), ("k3_plus", "k3+")])
def test_kl_estimates_are_those_of_verl(ours: Any, theirs: str) -> None:
    padded = Padded(5)
    left, right = padded.new.clone().requires_grad_(), padded.new.clone().requires_grad_()
    mine, verls = loss.kl_term(left, padded.mu, ours), core_algos.kl_penalty(right, padded.mu, theirs)
    mine.sum().backward()
    verls.sum().backward()
    assert mine.flatten().tolist() == pytest.approx(verls.flatten().tolist(), abs=1e-6)
    assert left.grad.flatten().tolist() == pytest.approx(right.grad.flatten().tolist(), abs=1e-6)


def test_the_critics_loss_is_that_of_verl() -> None:
    padded = Padded(6)
    theirs = padded.new.clone().requires_grad_()
    expected, _ = core_algos.compute_value_loss(
        vpreds=theirs,
        returns=padded.mu,
        values=padded.old,
        response_mask=padded.mask,
        cliprange_value=0.2,
        loss_agg_mode="token-mean",
    )
    expected.backward()
    ours = padded.new[padded.kept].clone().requires_grad_()
    found = loss.value_loss(ours, padded.old[padded.kept], padded.mu[padded.kept], 0.2).mean()
    found.backward()
    assert found.item() == pytest.approx(expected.item(), abs=1e-6)
    assert ours.grad.tolist() == pytest.approx(theirs.grad[padded.kept].tolist(), abs=1e-6)
