"""The facts of batches and retirements, from what was decided and computed."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import msgspec

from openforge.learner.backends.contract import StepStats
from openforge.learner.batcher import Retire, Train
from openforge.learner.step import Step
from openforge.protos import BatchTrained, TrajectoryRetired

IDENTITY = f"{socket.gethostname()}.{os.getpid()}"


def batch_trained(
    run: str, config_digest: str, action: Train, step: Step, stats: StepStats, step_s: float, others_held: int
) -> BatchTrained:
    """`others_held` is how many trajectories wait for a later batch."""
    return BatchTrained(
        run=run,
        version=action.base + 1,
        base=action.base,
        episodes=action.episodes,
        groups=action.groups,
        config_digest=config_digest,
        lag=action.lag,
        lags=action.lags,
        loss_tokens=action.loss_tokens,
        masked_tokens=action.masked_tokens,
        trained_tokens=stats.forwarded_tokens,
        reward_mean=step.reward_mean,
        metrics={
            **step.metrics,
            **{name: float(value) for name, value in msgspec.to_builtins(stats).items()},
            "zero_variance_groups": float(step.zero_variance_groups),
            "trained_tokens_per_s": stats.forwarded_tokens / step_s if step_s else 0.0,
            "held_trajectories": float(others_held),
        },
        step_s=step_s,
        learner=IDENTITY,
    )


def retirements(run: str, action: Retire) -> Iterator[TrajectoryRetired]:
    """One for each trajectory of the group."""
    for header in action.headers:
        yield TrajectoryRetired(
            run=run,
            episode=header.episode,
            group=action.group,
            reason=action.reason,
            version=action.version,
            lag=action.lag,
            sampled_tokens=header.sampled_tokens,
            detail=action.detail,
        )
