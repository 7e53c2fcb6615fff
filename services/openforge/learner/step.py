"""From verified trajectories to what a backend trains.

Promises: the same trajectories give the same step; each unmasked loss token is in it once; the weights of
the loss run over the whole step, those tokens included whose group has nothing to learn from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from openforge.learner.advantage import advantages, zero_variance
from openforge.learner.loss import token_weights
from openforge.learner.packing import TrainSequence
from openforge.learner.trajectories import Tokens, unpack
from openforge.protos import TrajectoryVerified
from openforge.runs.config import AlgorithmSection


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What batch `base` -> `base` + 1 is computed on, in this order.

    Tokens sampled before version `oldest_allowed` are context.
    """

    base: int
    groups: tuple[tuple[TrajectoryVerified, ...], ...]
    oldest_allowed: int = 0


class Step(msgspec.Struct, frozen=True, kw_only=True):
    sequences: tuple[TrainSequence, ...]
    loss_tokens: int
    reward_mean: float
    zero_variance_groups: int
    metrics: dict[str, float]


def batch_of(
    base: int, groups: Sequence[str], trajectories: Mapping[str, TrajectoryVerified], oldest_allowed: int
) -> Batch:
    """Group the trajectories of a batch, given in the batch's order."""
    members: dict[str, list[TrajectoryVerified]] = {group: [] for group in groups}
    for trajectory in trajectories.values():
        members[trajectory.group].append(trajectory)
    return Batch(base=base, groups=tuple(map(tuple, members.values())), oldest_allowed=oldest_allowed)


def step_of(batch: Batch, algorithm: AlgorithmSection, vocabulary: int) -> Step:
    unpacked: list[tuple[Tokens, float, float]] = []
    for group in batch.groups:
        rewards_G = [trajectory.reward for trajectory in group]
        advantages_G = advantages(rewards_G, algorithm.advantage, algorithm.advantage_eps)
        for trajectory, advantage in zip(group, advantages_G, strict=True):
            for sequence in trajectory.sequences:
                tokens = _masked(unpack(sequence, vocabulary), batch.oldest_allowed)
                unpacked.append((tokens, advantage, trajectory.temperature))
    weights_S = token_weights([len(tokens.at_K) for tokens, _, _ in unpacked], algorithm.aggregation)
    members = [trajectory for group in batch.groups for trajectory in group]
    silent = sum(zero_variance([member.reward for member in group]) for group in batch.groups)
    return Step(
        sequences=tuple(
            TrainSequence(
                ids_T=tokens.ids_T,
                at_K=tokens.at_K,
                mu_logprobs_K=tokens.logprobs_K,
                advantage=advantage,
                weight=weight,
                temperature=temperature,
            )
            for (tokens, advantage, temperature), weight in zip(unpacked, weights_S, strict=True)
        ),
        loss_tokens=sum(len(tokens.at_K) for tokens, _, _ in unpacked),
        reward_mean=_mean([member.reward for member in members]),
        zero_variance_groups=silent,
        metrics=_metrics(members),
    )


def _masked(tokens: Tokens, oldest_allowed: int) -> Tokens:
    kept = [k for k, version in enumerate(tokens.versions_K) if version >= oldest_allowed]
    if len(kept) == len(tokens.at_K):
        return tokens
    return Tokens(
        ids_T=tokens.ids_T,
        at_K=[tokens.at_K[k] for k in kept],
        logprobs_K=[tokens.logprobs_K[k] for k in kept],
        versions_K=[tokens.versions_K[k] for k in kept],
    )


def _metrics(members: Sequence[TrajectoryVerified]) -> dict[str, float]:
    sampled = [float(member.sampled_tokens) for member in members]
    return {
        "reward_max": max((member.reward for member in members), default=0.0),
        "reward_positive": _mean([float(member.reward > 0) for member in members]),
        "sampled_tokens": sum(sampled),
        "sampled_tokens_mean": _mean(sampled),
        "prompt_tokens_mean": _mean([float(member.prompt_tokens) for member in members]),
        "sequences_per_episode": _mean([float(len(member.sequences)) for member in members]),
        "turns_mean": _mean([float(member.turns) for member in members]),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
