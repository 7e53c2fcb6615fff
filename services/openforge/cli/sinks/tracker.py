"""Weights & Biases and trackio, which is a drop-in for it: both take `log` of a dict.

Promises: points are drawn over `version`, whatever the order in which they come. Each start is a run of its own there:
resume by a reader's name (`--name`), so that no point is sent twice.
"""

from collections.abc import Mapping
from typing import Any, Protocol


class _Run(Protocol):
    def log(self, data: dict[str, Any]) -> object: ...
    def finish(self) -> object: ...


def wandb_run(project: str, run: str) -> "Tracker":
    """Where and whether online is `wandb`'s own affair: WANDB_MODE, WANDB_DIR, WANDB_API_KEY."""
    import wandb

    begun = wandb.init(project=project, name=run, group=run)
    begun.define_metric("*", step_metric="version")
    return Tracker(begun)


def trackio_run(project: str, run: str) -> "Tracker":
    """Where is `trackio`'s own affair: TRACKIO_DIR."""
    import trackio

    return Tracker(trackio.init(project=project, name=run, resume="allow"))


class Tracker:
    def __init__(self, run: _Run) -> None:
        self._run = run

    def point(self, version: int, values: Mapping[str, float], at: float) -> None:
        self._run.log({"version": version, "told_at": at, **values})

    def episode(self, row: Mapping[str, Any]) -> None:
        """Curves only."""

    def flush(self) -> None:
        """They send by themselves."""

    def close(self) -> None:
        self._run.finish()
