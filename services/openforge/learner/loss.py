"""Per-token losses. Each is one formula over N tokens; `objective.py` says which apply.

Promises: log-ratios are bounded, so nothing overflows; weights carry no gradient; which centre, clip, level
and weight applies is an argument, never guessed.

pi: the policy in training. old: the centre, which is mu (what sampled, recorded by the engine) in `bypass` and the
learner's own weights before the step in `decoupled`. A: advantage. sg: no gradient. Tokens of one sequence have the
same index in `sequence_N`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3", "k3_plus"]

LOG_RATIO_BOUND = 20.0
"""exp(20) is far beyond any clip and far below overflow."""

SEQUENCE_LOG_RATIO_MOST = 10.0
"""The same for GSPO's ratio, as in verl."""

KL_MOST = 10.0
"""The most that one token adds to k3, as in verl."""


def log_ratio(logprobs_N: Tensor, old_logprobs_N: Tensor) -> Tensor:
    """log pi - log old, bounded so that its exponential is finite."""
    return (logprobs_N - old_logprobs_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def reinforce(logprobs_N: Tensor, advantages_N: Tensor, weights_N: Tensor) -> Tensor:
    """-sg(w) * A * log pi, for each token.

    REINFORCE with importance weights. With `token_tis` of pi/mu it is truncated as in IMPALA (arXiv 1802.01561), which
    is CISPO clipped from above only (arXiv 2506.13585).
    """
    return -weights_N.detach() * advantages_N * logprobs_N


def ppo_clip(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> Tensor:
    """max(-A*r, -A*clip(r, 1 - clip_low, 1 + clip_high)) with r = pi/old, for each token.

    PPO (arXiv 1707.06347) with the two bounds of DAPO (arXiv 2503.14476). With `dual_clip` c > 1, where A < 0, at most
    -A*c (arXiv 1912.09729); 0 is off.
    """
    ratios_N = log_ratio(logprobs_N, old_logprobs_N).exp()
    clipped_N = ratios_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    losses_N = (-advantages_N * ratios_N).maximum(-advantages_N * clipped_N)
    if not dual_clip:
        return losses_N
    return losses_N.minimum(-advantages_N * dual_clip).where(advantages_N < 0, losses_N)


def gspo(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    sequence_N: Tensor,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """PPO's clip of sg(s) * pi/sg(pi), where s is the sequence's ratio per token: exp(mean of log pi - log old).

    GSPO in its token form (arXiv 2507.18071; verl `compute_policy_loss_gspo`): the value is the sequence's, the
    gradient is each token's own.
    """
    delta_N = (logprobs_N - old_logprobs_N).detach()
    mean_N = per_sequence(delta_N, sequence_N) / per_sequence(delta_N.new_ones(delta_N.shape), sequence_N)
    log_s_N = logprobs_N - logprobs_N.detach() + mean_N
    ratios_N = log_s_N.clamp(max=SEQUENCE_LOG_RATIO_MOST).exp()
    clipped_N = ratios_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    return (-advantages_N * ratios_N).maximum(-advantages_N * clipped_N)


def cispo(
    logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) * A * log pi: no token loses its gradient.

    CISPO (MiniMax-M1, arXiv 2506.13585; verl `compute_policy_loss_cispo`). Both bounds are relative to 1; from above
    only (the paper, TRL, whose bound is absolute) is clip_low = 1.
    """
    ratios_N = log_ratio(logprobs_N, old_logprobs_N).exp()
    return reinforce(logprobs_N, advantages_N, ratios_N.clamp(1.0 - clip_low, 1.0 + clip_high))


def dppo_tv(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    clip_low: float,
    clip_high: float,
    ratio_cap: float,
) -> Tensor:
    """-A * sg(min(r, ratio_cap)) * log pi; 0 where A > 0 and pi - old > clip_high, or A <= 0 and pi - old < -clip_low.

    DPPO with the total-variation mask (arXiv 2602.04879; verl `compute_policy_loss_dppo_tv`): the bound is on
    probabilities, so that rare tokens are not cut for a large ratio.
    """
    ratios_N = log_ratio(logprobs_N, old_logprobs_N).exp().clamp(max=ratio_cap)
    moved_N = (logprobs_N.exp() - old_logprobs_N.exp()).detach()
    too_far_N = (moved_N > clip_high).where(advantages_N > 0, moved_N < -clip_low)
    return reinforce(logprobs_N, advantages_N, ratios_N).masked_fill(too_far_N, 0.0)


def token_tis(log_ratios_N: Tensor, ratio_cap: float) -> Tensor:
    """min(rho, ratio_cap), each token's own: truncated importance sampling (IMPALA; verl `rollout_is = "token"`)."""
    return log_ratios_N.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().clamp(max=ratio_cap)


def sequence_tis(log_ratios_N: Tensor, sequence_N: Tensor, ratio_cap: float) -> Tensor:
    """min(product of rho over the sequence, ratio_cap), the same for all its tokens (verl's "sequence")."""
    return token_tis(per_sequence(log_ratios_N, sequence_N), ratio_cap)


def icepop(log_ratios_N: Tensor, ratio_floor: float, ratio_cap: float) -> Tensor:
    """rho where ratio_floor <= rho <= ratio_cap, else 0 (IcePop, arXiv 2510.18855; verl `"0.5_2.0"`).

    A token that falls out still counts in the loss's denominator, so the others gain no weight.
    """
    rho_N = log_ratios_N.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return rho_N.masked_fill((rho_N < ratio_floor) | (rho_N > ratio_cap), 0.0)


def kl_term(logprobs_N: Tensor, reference_N: Tensor, estimator: KlEstimator) -> Tensor:
    """How far pi is from the reference, by d = log ref - log pi: k1 = -d, k2 = d^2/2, k3 = exp(d) - d - 1.

    Schulman, "Approximating KL divergence" (2020); the bounds (d to 20, k3 to 10) are verl's. As a loss only k2 has the
    gradient of the KL: k1's is zero in expectation, k3's that of the reverse direction. `k3_plus` has the value of
    k3 and the gradient of k2.
    """
    match estimator:
        case "k1":
            return logprobs_N - reference_N
        case "k2":
            return 0.5 * (logprobs_N - reference_N).square()
        case "k3":
            d_N = (reference_N - logprobs_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
            return (d_N.exp() - d_N - 1.0).clamp(-KL_MOST, KL_MOST)
        case "k3_plus":
            k2_N = kl_term(logprobs_N, reference_N, "k2")
            return k2_N - k2_N.detach() + kl_term(logprobs_N, reference_N, "k3").detach()


def value_loss(values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, value_clip: float) -> Tensor:
    """0.5 * max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), for each token.

    PPO's clipped critic loss (OpenAI baselines; verl `compute_value_loss`).
    """
    clipped_N = old_values_N + (values_N - old_values_N).clamp(-value_clip, value_clip)
    return 0.5 * (values_N - returns_N).square().maximum((clipped_N - returns_N).square())


def per_sequence(values_N: Tensor, sequence_N: Tensor) -> Tensor:
    """At each token the sum over its sequence."""
    sums_S = values_N.new_zeros(int(sequence_N.max()) + 1 if len(sequence_N) else 0)
    return sums_S.index_add(0, sequence_N, values_N)[sequence_N]
