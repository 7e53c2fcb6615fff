"""What a batch needs beside its trajectories, and what it means that something is gone."""

from __future__ import annotations

from openforge.blobs import BlobLost, Blobs
from openforge.learner.routing import Mixture, Replay, files_of
from openforge.learner.step import Batch


class ExpertsLost(Exception):
    """What engines told of their experts is gone: for each group that needs it, of whom, in one phrase."""

    def __init__(self, groups: dict[str, str]) -> None:
        super().__init__("; ".join(groups.values()))
        self.groups = groups


class LineageBroken(RuntimeError):
    """What was recorded can no longer be computed again."""


async def replay_of(blobs: Blobs, mixture: Mixture | None, batch: Batch) -> Replay | None:
    """What engines told of their experts for this batch; None where the backend sends tokens where it likes.

    Raises `ExpertsLost`. A group that cannot be replayed is not trained otherwise: whether a file is there must not
    decide what a batch is.
    """
    if mixture is None:
        return None
    files, lost = dict[str, bytes](), dict[str, str]()
    for member in (member for group in batch.groups for member in group):
        try:
            files |= {ref.digest: await blobs.get(ref) for ref in files_of([member]) if ref.digest not in files}
        except BlobLost as gone:
            lost.setdefault(member.group, f"{member.episode}: what engines told of its experts is gone: {gone}")
    if lost:
        raise ExpertsLost(lost)
    return Replay(mixture, files)


async def recorded_replay_of(blobs: Blobs, mixture: Mixture | None, batch: Batch) -> Replay | None:
    """Of a batch that was trained with it. Raises `LineageBroken`."""
    try:
        return await replay_of(blobs, mixture, batch)
    except ExpertsLost as lost:
        raise LineageBroken(
            f"the batch after version {batch.base} is recorded and cannot be computed again: {lost}; restore the "
            "blobs, or start a run of another name"
        ) from lost
