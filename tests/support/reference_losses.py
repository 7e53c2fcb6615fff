"""What the losses are, a second time: token by token, in Python floats, from the formulas in the papers.

Nothing here is shared with the code it checks. A stop-gradient is written as `frozen`, a copy of the log-probs that
does not move when a derivative is taken; derivatives are central differences.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Case(NamedTuple):
    """N tokens. `old` is the centre, `mu` what sampled, `sequence` the index of each token's sequence."""

    mu: list[float]
    old: list[float]
    reference: list[float]
    advantage: list[float]
    sequence: list[int]


Losses = Callable[[Sequence[float], Sequence[float], Case], list[float]]
"""(pi, frozen pi, case) -> the loss of each token."""


def gradient(losses: Losses, pi: Sequence[float], case: Case, weights: Sequence[float], h: float = 1e-6) -> list[float]:
    """d(sum of weight * loss) / d(log pi of each token)."""

    def total(moved: Sequence[float]) -> float:
        return math.fsum(weight * one for weight, one in zip(weights, losses(moved, pi, case), strict=True))

    found = []
    for n in range(len(pi)):
        above, below = list(pi), list(pi)
        above[n] += h
        below[n] -= h
        found.append((total(above) - total(below)) / (2 * h))
    return found


def ppo(low: float, high: float, dual: float = 0.0) -> Losses:
    def losses(pi: Sequence[float], frozen: Sequence[float], case: Case) -> list[float]:
        found = []
        for now, old, advantage in zip(pi, case.old, case.advantage, strict=True):
            ratio = math.exp(now - old)
            one = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
            found.append(min(one, -advantage * dual) if dual and advantage < 0 else one)
        return found

    return losses


def gspo(low: float, high: float) -> Losses:
    def losses(pi: Sequence[float], frozen: Sequence[float], case: Case) -> list[float]:
        found = []
        for n, (now, advantage) in enumerate(zip(pi, case.advantage, strict=True)):
            members = [i for i, sequence in enumerate(case.sequence) if sequence == case.sequence[n]]
            mean = sum(frozen[i] - case.old[i] for i in members) / len(members)
            ratio = math.exp(mean) * math.exp(now) / math.exp(frozen[n])
            found.append(max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high)))
        return found

    return losses


def cispo(low: float, high: float) -> Losses:
    def losses(pi: Sequence[float], frozen: Sequence[float], case: Case) -> list[float]:
        return [
            -min(max(math.exp(still - old), 1 - low), 1 + high) * advantage * now
            for now, still, old, advantage in zip(pi, frozen, case.old, case.advantage, strict=True)
        ]

    return losses


def dppo_tv(low: float, high: float, cap: float) -> Losses:
    def losses(pi: Sequence[float], frozen: Sequence[float], case: Case) -> list[float]:
        found = []
        for now, still, old, advantage in zip(pi, frozen, case.old, case.advantage, strict=True):
            moved = math.exp(still) - math.exp(old)
            gone = moved > high if advantage > 0 else moved < -low
            found.append(0.0 if gone else -advantage * min(math.exp(still - old), cap) * now)
        return found

    return losses


def reinforce(weigh: Callable[[Sequence[float], Sequence[int]], list[float]]) -> Losses:
    def losses(pi: Sequence[float], frozen: Sequence[float], case: Case) -> list[float]:
        weights = weigh([still - mu for still, mu in zip(frozen, case.mu, strict=True)], case.sequence)
        return [-weight * a * now for weight, a, now in zip(weights, case.advantage, pi, strict=True)]

    return losses


def weighted(inner: Losses, weigh: Callable[[Sequence[float], Sequence[int]], list[float]]) -> Losses:
    """`inner` around the centre, weighed by centre / mu."""

    def losses(pi: Sequence[float], frozen: Sequence[float], case: Case) -> list[float]:
        weights = weigh([old - mu for old, mu in zip(case.old, case.mu, strict=True)], case.sequence)
        return [weight * one for weight, one in zip(weights, inner(pi, frozen, case), strict=True)]

    return losses


def with_kl(inner: Losses, coefficient: float, kind: str) -> Losses:
    def losses(pi: Sequence[float], frozen: Sequence[float], case: Case) -> list[float]:
        found = []
        for one, now, still, reference in zip(inner(pi, frozen, case), pi, frozen, case.reference, strict=True):
            d, d_still = reference - now, reference - still
            k2 = 0.5 * d * d
            kl = {
                "k1": -d,
                "k2": k2,
                "k3": math.exp(d) - d - 1,
                "k3_plus": k2 - 0.5 * d_still * d_still + math.exp(d_still) - d_still - 1,
            }[kind]
            found.append(one + coefficient * kl)
        return found

    return losses


def token_tis(cap: float) -> Callable[[Sequence[float], Sequence[int]], list[float]]:
    return lambda log_rho, sequence: [min(math.exp(one), cap) for one in log_rho]


def sequence_tis(cap: float) -> Callable[[Sequence[float], Sequence[int]], list[float]]:
    def weigh(log_rho: Sequence[float], sequence: Sequence[int]) -> list[float]:
        return [
            min(math.prod(math.exp(one) for one, other in zip(log_rho, sequence, strict=True) if other == own), cap)
            for own in sequence
        ]

    return weigh


def icepop(low: float, high: float) -> Callable[[Sequence[float], Sequence[int]], list[float]]:
    return lambda log_rho, sequence: [math.exp(one) if low <= math.exp(one) <= high else 0.0 for one in log_rho]


def value_losses(
    values: Sequence[float], before: Sequence[float], returns: Sequence[float], clip: float
) -> list[float]:
    return [
        0.5 * max((value - target) ** 2, (min(max(value, old - clip), old + clip) - target) ** 2)
        for value, old, target in zip(values, before, returns, strict=True)
    ]


def gae(values: Sequence[float], reward: float, gamma: float, lam: float) -> list[float]:
    """A_k = sum over l of (gamma * lambda)^l * delta_{k+l}, summed out instead of recursed."""
    after = [*values[1:], 0.0]
    earned = [0.0] * (len(values) - 1) + [reward]
    deltas = [r + gamma * nxt - v for r, nxt, v in zip(earned, after, values, strict=True)]
    return [
        math.fsum((gamma * lam) ** (later - k) * deltas[later] for later in range(k, len(deltas)))
        for k in range(len(deltas))
    ]
