"""How much better than others each episode did.

Promises: an advantage belongs to an episode, whatever its length and however many branches it has, and only
`reinforce_pp` and `reinforce_pp_baseline` look at lengths, as published; members of a group that all earned the
same have an advantage of exactly 0 where the comparison is within the group, and so has a group of one.

G is the members of a group, E the episodes of a batch, K the loss tokens of a sequence.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Literal

GroupEstimator = Literal["grpo", "dr_grpo", "rloo", "maxrl"]
BatchEstimator = Literal["grpo_batch_std", "reinforce_pp", "reinforce_pp_baseline"]
Estimator = Literal[GroupEstimator, BatchEstimator, "gae"]

WHITENING_EPS = 1e-8
"""Under the root, as in verl's `masked_whiten`."""


def batch_advantages(
    rewards_E: Sequence[float],
    loss_tokens_E: Sequence[int],
    group_sizes: Sequence[int],
    estimator: Estimator,
    eps: float = 1e-6,
) -> list[float]:
    """One advantage for each of the E episodes, given group after group. `gae` has none here: a critic gives each token
    its own."""
    groups = list(_cut(rewards_E, group_sizes))
    match estimator:
        case "grpo" | "dr_grpo" | "rloo" | "maxrl":
            return [advantage for rewards_G in groups for advantage in advantages(rewards_G, estimator, eps)]
        case "grpo_batch_std":
            return grpo_batch_std(groups, eps)
        case "reinforce_pp":
            return whitened(rewards_E, loss_tokens_E)
        case "reinforce_pp_baseline":
            centred_E = [value for rewards_G in groups for value in advantages(rewards_G, "dr_grpo")]
            return whitened(centred_E, loss_tokens_E)
        case "gae":
            return [0.0] * len(rewards_E)


def advantages(rewards_G: Sequence[float], estimator: GroupEstimator, eps: float = 1e-6) -> list[float]:
    """One advantage for each of the G members of a group.

    grpo: (R - mean) / (std + eps), std with n-1 (arXiv 2402.03300; verl, TRL). dr_grpo: R - mean
    (arXiv 2503.20783). rloo: R minus the mean of the others = n / (n-1) * (R - mean) (arXiv 2402.14740).
    maxrl: (R - mean) / mean, for rewards that are not negative (MaxRL, as in prime-rl's `algorithms` page); 0 where the
    mean is not above 0.
    """
    if zero_variance(rewards_G):
        return [0.0] * len(rewards_G)
    mean = statistics.fmean(rewards_G)
    centred_G = [reward - mean for reward in rewards_G]
    match estimator:
        case "grpo":
            scale = 1.0 / (statistics.stdev(rewards_G) + eps)
        case "dr_grpo":
            scale = 1.0
        case "rloo":
            scale = len(rewards_G) / (len(rewards_G) - 1)
        case "maxrl":
            scale = 1.0 / mean if mean > 0 else 0.0
    return [scale * centred for centred in centred_G]


def zero_variance(rewards_G: Sequence[float]) -> bool:
    """Nothing can be learned by comparing: all earned the same, or there is nobody to compare with."""
    return len(set(rewards_G)) < 2


def grpo_batch_std(groups: Sequence[Sequence[float]], eps: float) -> list[float]:
    """(R - mean of the group) / (std of all rewards of the batch + eps), std with n-1: TRL's `scale_rewards = "batch"`
    (Lite PPO, arXiv 2508.08221). Returns one for each of the E episodes."""
    rewards_E = [reward for rewards_G in groups for reward in rewards_G]
    if zero_variance(rewards_E):
        return [0.0] * len(rewards_E)
    scale = 1.0 / (statistics.stdev(rewards_E) + eps)
    return [scale * centred for rewards_G in groups for centred in advantages(rewards_G, "dr_grpo")]


def whitened(values_E: Sequence[float], tokens_E: Sequence[int], eps: float = WHITENING_EPS) -> list[float]:
    """(x - mean) / sqrt(var + eps) over all tokens of a batch, each of which has its episode's value; var with n-1.

    REINFORCE++ (arXiv 2501.03262) normalises over the global batch, and verl and OpenRLHF do it token by token:
    of R for `reinforce_pp`, of R - mean of the group for `reinforce_pp_baseline`.
    """
    count = sum(tokens_E)
    if count < 2 or zero_variance([value for value, tokens in zip(values_E, tokens_E, strict=True) if tokens]):
        return [0.0] * len(values_E)
    mean = math.fsum(value * tokens for value, tokens in zip(values_E, tokens_E, strict=True)) / count
    squares = math.fsum((value - mean) ** 2 * tokens for value, tokens in zip(values_E, tokens_E, strict=True))
    scale = 1.0 / math.sqrt(squares / (count - 1) + eps)
    return [scale * (value - mean) for value in values_E]


def gae(values_K: Sequence[float], reward: float, gamma: float, gae_lambda: float) -> tuple[list[float], list[float]]:
    """Advantages and returns of the K sampled tokens of one sequence, whose `reward` comes after the last.

    delta_k = r_k + gamma * V_{k+1} - V_k; A_k = delta_k + gamma * lambda * A_{k+1}; return_k = A_k + V_k
    (arXiv 1506.02438; verl `compute_gae_advantage_return`). What stands between sampled tokens (tool output) is part
    of the world's answer: it takes no time and has no value of its own.
    """
    advantages_K, after, next_value = [0.0] * len(values_K), 0.0, 0.0
    for k in reversed(range(len(values_K))):
        earned = reward if k == len(values_K) - 1 else 0.0
        after = earned + gamma * next_value - values_K[k] + gamma * gae_lambda * after
        next_value = values_K[k]
        advantages_K[k] = after
    return advantages_K, [advantage + value for advantage, value in zip(advantages_K, values_K, strict=True)]


def overlong_penalty(sampled_tokens: int, limit: int, buffer: int, most: float = 1.0) -> float:
    """What to add to a reward: 0 up to `limit - buffer` tokens, then linear to -most at `limit` and beyond.

    DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), over all that an episode sampled. 0 where
    `limit` is 0.
    """
    if not limit or sampled_tokens <= limit - buffer:
        return 0.0
    if sampled_tokens >= limit:
        return -most
    return -most * (sampled_tokens - (limit - buffer)) / buffer


def _cut(values_E: Sequence[float], sizes: Sequence[int]) -> Iterator[Sequence[float]]:
    """The values group by group."""
    start = 0
    for size in sizes:
        yield values_E[start : start + size]
        start += size
