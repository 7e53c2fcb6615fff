"""From the settings of `[algorithm]` to the loss of a row's tokens: which centre, which loss, which weight, which KL.

Promises: the correction for who sampled is applied exactly once: in `bypass` it is the ratio itself, or the weight of
`reinforce_is`; in `decoupled` it is the weight old/mu, and the ratio is pi/old with an old that stays fixed over all
mini-batches and epochs of a step (arXiv 2110.00641).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from openforge.learner import loss
from openforge.runs.config import AlgorithmSection

if TYPE_CHECKING:
    from torch import Tensor


class LossTokens(NamedTuple):
    """N loss tokens. `proximal_N`: log-probs by the learner's weights before the step (`decoupled`); `reference_N`: by
    those of the run's start (KL). `sequence_N` counts the row's sequences from 0."""

    logprobs_N: Tensor
    mu_logprobs_N: Tensor
    advantages_N: Tensor
    sequence_N: Tensor
    proximal_N: Tensor | None = None
    reference_N: Tensor | None = None


def needs_proximal(algorithm: AlgorithmSection) -> bool:
    return algorithm.objective == "decoupled"


def needs_reference(algorithm: AlgorithmSection) -> bool:
    return algorithm.kl_coefficient > 0


def teaches_without_advantage(algorithm: AlgorithmSection) -> bool:
    """Whether sequences whose advantage is 0 have a gradient all the same, or get one from a critic."""
    return needs_reference(algorithm) or algorithm.advantage == "gae"


def token_losses(algorithm: AlgorithmSection, tokens: LossTokens) -> Tensor:
    """The loss of each of the N tokens, before it is weighed by its share of the step."""
    weights_N = correction_weights(algorithm, tokens)
    losses_N = _surrogate(algorithm, tokens, weights_N)
    if tokens.reference_N is None:
        return losses_N
    kl_N = loss.kl_term(tokens.logprobs_N, tokens.reference_N, algorithm.kl_estimator)
    return losses_N + algorithm.kl_coefficient * kl_N


def correction_weights(algorithm: AlgorithmSection, tokens: LossTokens) -> Tensor | None:
    """The weight for having been sampled by mu and not by pi (old in `decoupled`); None where the ratio is it."""
    if tokens.proximal_N is not None:
        log_rho_N = tokens.proximal_N - tokens.mu_logprobs_N
    elif algorithm.loss == "reinforce_is":
        log_rho_N = (tokens.logprobs_N - tokens.mu_logprobs_N).detach()
    else:
        return None
    match algorithm.correction:
        case "none":
            return log_rho_N.new_ones(log_rho_N.shape)
        case "auto" | "token_tis":
            return loss.token_tis(log_rho_N, algorithm.ratio_cap)
        case "sequence_tis":
            return loss.sequence_tis(log_rho_N, tokens.sequence_N, algorithm.ratio_cap)
        case "icepop":
            return loss.icepop(log_rho_N, algorithm.ratio_floor, algorithm.ratio_cap)


def ratio_limit(algorithm: AlgorithmSection) -> float:
    """The ratio to mu above which a token counts as capped in the report."""
    return algorithm.ratio_cap if algorithm.loss in ("reinforce_is", "dppo_tv") else 1.0 + algorithm.clip_high


def _surrogate(algorithm: AlgorithmSection, tokens: LossTokens, weights_N: Tensor | None) -> Tensor:
    if algorithm.loss == "reinforce_is":
        assert weights_N is not None, "reinforce_is always has weights"
        return loss.reinforce(tokens.logprobs_N, tokens.advantages_N, weights_N)
    losses_N = _clipped(algorithm, tokens)
    return losses_N if weights_N is None else weights_N * losses_N


def _clipped(algorithm: AlgorithmSection, tokens: LossTokens) -> Tensor:
    pi_N, advantages_N = tokens.logprobs_N, tokens.advantages_N
    old_N = tokens.mu_logprobs_N if tokens.proximal_N is None else tokens.proximal_N
    low, high = algorithm.clip_low, algorithm.clip_high
    match algorithm.loss:
        case "gspo":
            return loss.gspo(pi_N, old_N, advantages_N, tokens.sequence_N, low, high)
        case "cispo":
            return loss.cispo(pi_N, old_N, advantages_N, low, high)
        case "dppo_tv":
            return loss.dppo_tv(pi_N, old_N, advantages_N, low, high, algorithm.ratio_cap)
        case _:
            return loss.ppo_clip(pi_N, old_N, advantages_N, low, high, algorithm.dual_clip)
