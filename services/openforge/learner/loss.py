"""Per-token losses and how they are summed over a step.

Promises: the ratio is against the recorded log-probs of the engine that sampled, so it already is the
off-policy correction and gets no second weight; weights of a step are computed over the whole step,
so that cutting it into rows, ranks and micro-batches changes nothing.

N is the number of loss tokens. pi: the policy in training; mu: what sampled; A: advantage; sg: no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean"]

LOG_RATIO_BOUND = 20.0
"""exp(20) is far beyond any clip and far below overflow."""


def log_ratio(logprobs_N: Tensor, mu_logprobs_N: Tensor) -> Tensor:
    """log pi - log mu, bounded so that its exponential is finite."""
    return (logprobs_N - mu_logprobs_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def reinforce_is(logprobs_N: Tensor, mu_logprobs_N: Tensor, advantages_N: Tensor, ratio_cap: float) -> Tensor:
    """-sg(min(pi/mu, ratio_cap)) * A * log pi, for each token.

    REINFORCE with truncated importance weights; truncation as in IMPALA (arXiv 1802.01561), per token as in
    CISPO clipped from above only (arXiv 2506.13585). The weight carries no gradient.
    """
    weights_N = log_ratio(logprobs_N, mu_logprobs_N).exp().clamp(max=ratio_cap).detach()
    return -weights_N * advantages_N * logprobs_N


def ppo_clip(
    logprobs_N: Tensor, mu_logprobs_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """max(-A*r, -A*clip(r, 1 - clip_low, 1 + clip_high)) with r = pi/mu, for each token.

    PPO (arXiv 1707.06347) with the two bounds of DAPO (arXiv 2503.14476), against what sampled ("bypass").
    """
    ratios_N = log_ratio(logprobs_N, mu_logprobs_N).exp()
    clipped_N = ratios_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    return (-advantages_N * ratios_N).maximum(-advantages_N * clipped_N)


def token_weights(loss_tokens_S: Sequence[int], aggregation: Aggregation) -> list[float]:
    """The weight of each loss token of each of the S sequences of a whole step; all weights sum to 1.

    token_mean: 1 / loss tokens of the step (DAPO). sequence_mean: mean over sequences of the mean over
    tokens (arXiv 2402.03300). Sequences without loss tokens count nowhere.
    """
    with_loss = sum(1 for tokens in loss_tokens_S if tokens)
    match aggregation:
        case "token_mean":
            return [1.0 / sum(loss_tokens_S) if tokens else 0.0 for tokens in loss_tokens_S]
        case "sequence_mean":
            return [1.0 / (with_loss * tokens) if tokens else 0.0 for tokens in loss_tokens_S]
