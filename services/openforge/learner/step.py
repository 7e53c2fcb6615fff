"""From verified trajectories to what a backend trains.

Promises: the same trajectories give the same step; each unmasked loss token is in it once; the weights of
the loss run over the whole step, those tokens included whose group has nothing to learn from.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from openforge.learner.advantage import batch_advantages, overlong_penalty, zero_variance
from openforge.learner.aggregation import token_weights
from openforge.learner.packing import TrainSequence
from openforge.learner.routing import Replay, Routing, replayed_share
from openforge.learner.trajectories import Tokens, unpack
from openforge.protos import TrajectoryVerified
from openforge.runs.config import AlgorithmSection


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What batch `base` -> `base` + 1 is computed on, in this order.

    Tokens sampled before version `oldest_allowed` are context. `group_size` is how many episodes each group was opened
    with, where episodes stand for those of their group that were lost; 0 where they do not.
    """

    base: int
    groups: tuple[tuple[TrajectoryVerified, ...], ...]
    oldest_allowed: int = 0
    group_size: int = 0


class Step(msgspec.Struct, frozen=True, kw_only=True):
    sequences: tuple[TrainSequence, ...]
    loss_tokens: int
    reward_mean: float
    zero_variance_groups: int
    metrics: dict[str, float]


def batch_of(
    base: int,
    groups: Sequence[str],
    trajectories: Mapping[str, TrajectoryVerified],
    oldest_allowed: int,
    group_size: int = 0,
) -> Batch:
    """Group the trajectories of a batch, given in the batch's order."""
    members: dict[str, list[TrajectoryVerified]] = {group: [] for group in groups}
    for trajectory in trajectories.values():
        members[trajectory.group].append(trajectory)
    own = tuple(map(tuple, members.values()))
    return Batch(base=base, groups=own, oldest_allowed=oldest_allowed, group_size=group_size)


def step_of(batch: Batch, algorithm: AlgorithmSection, vocabulary: int, replay: Replay | None = None) -> Step:
    """The sequences of a batch with advantages and weights. The advantage belongs to the episode: all its sequences
    have the same, and a mini-batch holds whole groups. With `replay` they say which experts their tokens went through.
    """
    members = [member for group in batch.groups for member in group]
    part_E = [index % algorithm.mini_batches for index, group in enumerate(batch.groups) for _ in group]
    drafts = [
        _Draft(episode=episode, part=part_E[episode], tokens=tokens)
        for episode, member in enumerate(members)
        for tokens in _tokens_of(member, batch.oldest_allowed, vocabulary)
    ]
    loss_tokens = Counter[int]()
    for draft in drafts:
        loss_tokens[draft.episode] += len(draft.tokens.at_K)
    rewards_E = [shaped_reward(member, algorithm) for member in members]
    advantages_E = batch_advantages(
        rewards_E,
        [loss_tokens[episode] for episode in range(len(members))],
        [len(group) for group in batch.groups],
        algorithm.advantage,
        algorithm.advantage_eps,
    )
    completion_E = completion_weights([len(group) for group in batch.groups], batch.group_size)
    weights = _weights(drafts, algorithm)
    if batch.group_size:
        weights = _completed(weights, drafts, completion_E)
    routings = [replay.laid(_forwarded(draft), draft.tokens.known) if replay else None for draft in drafts]
    return Step(
        sequences=tuple(
            TrainSequence(
                ids_T=draft.tokens.ids_T,
                at_K=draft.tokens.at_K,
                mu_logprobs_K=draft.tokens.logprobs_K,
                advantage=advantages_E[draft.episode],
                weight=weight,
                temperature=members[draft.episode].temperature,
                reward=rewards_E[draft.episode],
                part=draft.part,
                images=draft.tokens.images,
                routing=routing,
            )
            for draft, weight, routing in zip(drafts, weights, routings, strict=True)
        ),
        loss_tokens=sum(loss_tokens.values()),
        reward_mean=_mean([member.reward for member in members]),
        zero_variance_groups=sum(zero_variance([member.reward for member in group]) for group in batch.groups),
        metrics=_metrics(members)
        | _shaping_metrics(members, rewards_E, algorithm)
        | ({"routing_replayed": _replayed(drafts, routings)} if replay else {})
        | ({"completion_effective": _effective(completion_E)} if batch.group_size else {}),
    )


class _Draft(NamedTuple):
    """A sequence whose advantage and weight are not known yet. `episode` counts the batch's episodes from 0."""

    episode: int
    part: int
    tokens: Tokens


def _tokens_of(member: TrajectoryVerified, oldest_allowed: int, vocabulary: int) -> Iterator[Tokens]:
    for sequence in member.sequences:
        yield _masked(unpack(sequence, vocabulary), oldest_allowed)


def _replayed(drafts: Sequence[_Draft], routings: Sequence[Routing | None]) -> float:
    """The share of the tokens that are forwarded whose experts are known."""
    return replayed_share(zip(routings, map(_forwarded, drafts), strict=True))


def _forwarded(draft: _Draft) -> int:
    """How many tokens something is predicted from: those before the last that is trained."""
    return draft.tokens.at_K[-1] if draft.tokens.at_K else 0


def _weights(drafts: Sequence[_Draft], algorithm: AlgorithmSection) -> list[float]:
    """Over each optimizer step, which is a mini-batch."""
    weights = [0.0] * len(drafts)
    for part in range(algorithm.mini_batches):
        own = [index for index, draft in enumerate(drafts) if draft.part == part]
        found = token_weights(
            [len(drafts[index].tokens.at_K) for index in own],
            [drafts[index].episode for index in own],
            algorithm.aggregation,
            algorithm.horizon,
        )
        for index, weight in zip(own, found, strict=True):
            weights[index] = weight
    return weights


def completion_weights(sizes_G: Sequence[int], group_size: int) -> list[float]:
    """One weight for each episode: 1 / the share of its group that has a verdict (inverse probability of completion).

    A group is one drawn task, so each task counts as it was started, however many of its episodes were lost.
    Horvitz and Thompson 1952. The share is at least 2 / `group_size`: smaller groups are not trained.
    """
    return [group_size / size for size in sizes_G for _ in range(size)]


def _completed(weights: Sequence[float], drafts: Sequence[_Draft], completion_E: Sequence[float]) -> list[float]:
    """The token weights times their episodes', the sum over the tokens of each optimizer step as it was."""
    shares: dict[int, float] = defaultdict(float)
    raised: dict[int, float] = defaultdict(float)
    for draft, weight in zip(drafts, weights, strict=True):
        tokens = len(draft.tokens.at_K)
        shares[draft.part] += weight * tokens
        raised[draft.part] += weight * tokens * completion_E[draft.episode]
    return [
        weight * completion_E[draft.episode] * (shares[draft.part] / raised[draft.part] if raised[draft.part] else 1.0)
        for draft, weight in zip(drafts, weights, strict=True)
    ]


def _effective(weights_E: Sequence[float]) -> float:
    """Kish's effective sample size."""
    squares = sum(weight**2 for weight in weights_E)
    return sum(weights_E) ** 2 / squares if squares else 0.0


def shaped_reward(member: TrajectoryVerified, algorithm: AlgorithmSection) -> float:
    """The verdict, and what an answer that is too long loses."""
    return member.reward + overlong_penalty(
        member.sampled_tokens, algorithm.overlong_tokens, algorithm.overlong_buffer, algorithm.overlong_penalty
    )


def _masked(tokens: Tokens, oldest_allowed: int) -> Tokens:
    kept = [k for k, version in enumerate(tokens.versions_K) if version >= oldest_allowed]
    if len(kept) == len(tokens.at_K):
        return tokens
    return msgspec.structs.replace(
        tokens,
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


def _shaping_metrics(
    members: Sequence[TrajectoryVerified], rewards_E: Sequence[float], algorithm: AlgorithmSection
) -> dict[str, float]:
    if not algorithm.overlong_tokens:
        return {}
    lost = [member.reward - shaped for member, shaped in zip(members, rewards_E, strict=True)]
    return {"overlong_penalty_mean": _mean(lost), "overlong_episodes": float(sum(one > 0 for one in lost))}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
