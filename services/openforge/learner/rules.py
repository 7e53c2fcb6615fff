"""What a run file says to the batch former and to the checkpoints."""

from __future__ import annotations

from pathlib import Path

from openforge.learner.batcher import Rules
from openforge.learner.checkpoints import Checkpoints
from openforge.runs import RunConfig


def checkpoints_of(home: Path, config: RunConfig) -> Checkpoints:
    return Checkpoints(home / "checkpoints", config.learner.keep_checkpoints, config.learner.keep_best_checkpoints)


def rules_of(config: RunConfig) -> Rules:
    pacing = config.pacing
    return Rules(
        steps=config.run.steps,
        groups_per_step=pacing.groups_per_step,
        max_lag=pacing.max_lag,
        staleness=pacing.staleness,
        wait_timeout_s=pacing.wait_timeout_s,
        dynamic_sampling=pacing.dynamic_sampling,
        refills_per_step=pacing.refills_per_step,
        row_tokens=config.learner.row_tokens,
        groups_per_step_most=pacing.groups_per_step_most,
    )


def oldest_allowed(config: RunConfig, base: int) -> int:
    """The oldest version whose tokens are trained in the batch at `base`; of the others only `mask` has any."""
    return base - config.pacing.max_lag if config.pacing.staleness == "mask" else 0
