"""What a batch needs beside its trajectories, and what it means that something is gone."""

from __future__ import annotations

from openforge.blobs import BlobLost, Blobs
from openforge.learner.routing import Mixture, Replay, files_of
from openforge.learner.step import Batch


class LineageBroken(RuntimeError):
    """What was recorded can no longer be computed again."""


async def replay_of(blobs: Blobs, mixture: Mixture | None, batch: Batch) -> Replay | None:
    """What engines told of their experts for this batch; None where the backend sends tokens where it likes."""
    if mixture is None:
        return None
    refs = files_of(member for group in batch.groups for member in group)
    try:
        files = {ref.digest: await blobs.get(ref) for ref in refs}
    except BlobLost as lost:
        raise LineageBroken(
            f"what engines told of their experts is gone, and the batch after version {batch.base} needs it: {lost}; "
            "restore the blobs, or start a run of another name"
        ) from lost
    return Replay(mixture, files)
