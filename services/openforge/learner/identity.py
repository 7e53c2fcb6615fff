"""What makes two learners compute the same lineage.

Promises: whatever changes the numbers of a step changes the digest; threads, folders and how
often is saved do not.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from openforge.runs import RunConfig
from openforge.runs.config import HOW_IT_IS_TRAINED
from openforge.service import BadSettings


def training_digest(config: RunConfig) -> str:
    """The sha256, in hex, of all settings that a step depends on."""
    return hashlib.sha256(msgspec.json.encode(decisive(config), order="sorted")).hexdigest()


def decisive(config: RunConfig) -> dict[str, Any]:
    """The settings that a step depends on."""
    said = msgspec.to_builtins(config.learner)
    learner = {name: value for name, value in said.items() if name not in HOW_IT_IS_TRAINED}
    if not config.learner.routing_replay:
        del learner["routing_replay"]  # runs that began before there was any go on
    return {
        "model": config.model.path,
        "seed": config.run.seed,
        "groups_per_step": config.pacing.groups_per_step,
        **({"groups_per_step_most": most} if (most := config.pacing.groups_per_step_most) else {}),
        "max_lag": config.pacing.max_lag,
        "staleness": config.pacing.staleness,
        "algorithm": msgspec.to_builtins(config.algorithm),
        "learner": learner,
    }


class ConfigChanged(BadSettings):
    """The run's lineage was computed with other settings, and goes on with those or not at all."""

    def __init__(self, run: str, version: int, recorded: str, now: str) -> None:
        super().__init__(
            f"run {run!r}: version {version} was trained with the settings {recorded[:12]}, the run file now gives "
            f"{now[:12]}: restore the sections model, pacing, algorithm and learner, or give run.name another value"
        )
