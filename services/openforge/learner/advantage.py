"""How much better than its group each member did.

Promises: members of a group that all earned the same have an advantage of exactly 0, and so has a
group of one, whatever the estimator.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

Estimator = Literal["grpo", "dr_grpo", "rloo"]


def advantages(rewards_G: Sequence[float], estimator: Estimator, eps: float = 1e-6) -> list[float]:
    """One advantage for each of the G members of a group.

    grpo: (R - mean) / (std + eps), std with n-1 (arXiv 2402.03300; verl, TRL). dr_grpo: R - mean
    (arXiv 2503.20783). rloo: R minus the mean of the others = n / (n-1) * (R - mean) (arXiv 2402.14740).
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
    return [scale * centred for centred in centred_G]


def zero_variance(rewards_G: Sequence[float]) -> bool:
    """Nothing can be learned by comparing: all earned the same, or there is nobody to compare with."""
    return len(set(rewards_G)) < 2
