"""Sums over loss tokens that can be added over rows and ranks, and what they say at the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from openforge.learner.backends.contract import StepStats
from openforge.learner.loss import kl_term, log_ratio
from openforge.learner.objective import LossTokens, correction_weights, ratio_limit
from openforge.runs.config import AlgorithmSection

_SUMS = (
    *("tokens", "ratio", "ratio_squared", "capped", "gap", "kl", "entropy", "loss", "row_tokens", "rows"),
    *("clipped_low", "clipped_high", "weight", "weight_zero", "reference_kl", "critic_loss"),
)
_MAXIMA = ("ratio", "gap")


class StepSums:
    """Float64 sums and maxima; `merge` adds those of other ranks."""

    def __init__(self, algorithm: AlgorithmSection) -> None:
        self._algorithm = algorithm
        self.sums = torch.zeros(len(_SUMS), dtype=torch.float64)
        self.maxima = torch.zeros(len(_MAXIMA), dtype=torch.float64)

    def add(self, row_tokens: int, tokens: LossTokens, loss: Tensor) -> None:
        with torch.no_grad():
            delta_N = log_ratio(tokens.logprobs_N, tokens.mu_logprobs_N).double()
            ratio_N = delta_N.exp()
            sums = [
                torch.tensor(float(len(delta_N)), dtype=torch.float64),
                ratio_N.sum(),
                ratio_N.square().sum(),
                (ratio_N > ratio_limit(self._algorithm)).sum(),
                delta_N.abs().sum(),
                -delta_N.sum(),
                -tokens.logprobs_N.double().sum(),
                loss.double(),
                torch.tensor(float(row_tokens), dtype=torch.float64),
                torch.tensor(1.0, dtype=torch.float64),
                *self._corrections(tokens),
            ]
            self.sums += torch.stack([value.to("cpu", torch.float64) for value in sums])
            maxima = torch.stack([ratio_N.max(), delta_N.abs().max()]).cpu()
            self.maxima = torch.maximum(self.maxima, maxima)

    def _corrections(self, tokens: LossTokens) -> list[Tensor]:
        """Sums of: clipped from below, from above, weights, tokens without weight, reference KL, critic loss."""
        algorithm, none = self._algorithm, tokens.logprobs_N.new_zeros(())
        clipped_low, clipped_high = none, none
        if algorithm.loss != "reinforce_is":
            old_N = tokens.mu_logprobs_N if tokens.proximal_N is None else tokens.proximal_N
            moved_N = log_ratio(tokens.logprobs_N, old_N).exp()
            clipped_low = (moved_N < 1.0 - algorithm.clip_low).sum()
            clipped_high = (moved_N > 1.0 + algorithm.clip_high).sum()
        weights_N = correction_weights(algorithm, tokens)
        if weights_N is None:
            weights_N = torch.ones_like(tokens.logprobs_N)
        reference_kl = none
        if tokens.reference_N is not None:
            reference_kl = kl_term(tokens.logprobs_N, tokens.reference_N, algorithm.kl_estimator).sum()
        return [clipped_low, clipped_high, weights_N.sum(), (weights_N == 0).sum(), reference_kl, none]

    def add_critic(self, losses: Sequence[float]) -> None:
        """This rank's share of the critic's losses, one for each of its steps."""
        self.sums[_SUMS.index("critic_loss")] += sum(losses) / max(1, len(losses))

    def stats(
        self, *, grad_norm: float, learning_rate: float, critic_grad_norm: float = 0.0, explained_variance: float = 0.0
    ) -> StepStats:
        total = dict(zip(_SUMS, self.sums.tolist(), strict=True))
        highest = dict(zip(_MAXIMA, self.maxima.tolist(), strict=True))
        tokens = total["tokens"]
        if not tokens:
            return StepStats(grad_norm=grad_norm, learning_rate=learning_rate)
        return StepStats(
            loss=total["loss"],
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            rows=int(total["rows"]),
            forwarded_tokens=int(total["row_tokens"]),
            loss_tokens=int(tokens),
            ratio_mean=total["ratio"] / tokens,
            ratio_max=highest["ratio"],
            ratio_capped=total["capped"] / tokens,
            gap_mean=total["gap"] / tokens,
            gap_max=highest["gap"],
            kl_mean=total["kl"] / tokens,
            ess=total["ratio"] ** 2 / (tokens * total["ratio_squared"]),
            entropy_proxy=total["entropy"] / tokens,
            clipped_low=total["clipped_low"] / tokens,
            clipped_high=total["clipped_high"] / tokens,
            weight_mean=total["weight"] / tokens,
            weight_zero=total["weight_zero"] / tokens,
            reference_kl=total["reference_kl"] / tokens,
            critic_loss=total["critic_loss"],
            critic_grad_norm=critic_grad_norm,
            explained_variance=explained_variance,
        )
