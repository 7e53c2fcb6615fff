"""What the services say to each other. Nothing here does anything; importing it is instant."""

from openforge.protos.arrays import (
    common_length,
    count,
    covered,
    pack_ids,
    pack_logprobs,
    spans_of,
    unpack_ids,
    unpack_logprobs,
)
from openforge.protos.dead import DeadLetter
from openforge.protos.episode import (
    EpisodeEnded,
    EpisodeFailed,
    EpisodeLimits,
    EpisodeRequested,
    EpisodeSealed,
    EpisodeStarted,
    Isolation,
)
from openforge.protos.fact import SCHEMA_VERSION, BadKey, BlobRef, Fact, Span, VersionSpan, token
from openforge.protos.group import GroupClosed, GroupOpened, Member, Purpose, TaskRef
from openforge.protos.key import KEY_BUCKET, AttemptKey, key_entry
from openforge.protos.policy import (
    BatchTrained,
    EngineMeasured,
    LagCount,
    PolicyPublished,
    PolicyServed,
    TrajectoryRetired,
)
from openforge.protos.reasons import (
    BranchCause,
    Caller,
    EndReason,
    FailReason,
    FinishReason,
    RetireReason,
    StopReason,
    TurnStatus,
)
from openforge.protos.run import RunPaused, RunStopped, RunSubmitted
from openforge.protos.trajectory import Dropped, Sequence, TrajectoryVerified, env_token
from openforge.protos.turn import EngineIdentity, HarnessIdentity, Sampling, Timing, TurnRecorded, Usage

AnyFact = (
    RunSubmitted
    | RunPaused
    | RunStopped
    | GroupOpened
    | GroupClosed
    | EpisodeRequested
    | EpisodeStarted
    | EpisodeEnded
    | EpisodeSealed
    | EpisodeFailed
    | TurnRecorded
    | TrajectoryVerified
    | BatchTrained
    | TrajectoryRetired
    | PolicyPublished
    | PolicyServed
    | EngineMeasured
)

__all__ = [
    "KEY_BUCKET",
    "SCHEMA_VERSION",
    "AnyFact",
    "AttemptKey",
    "BadKey",
    "BatchTrained",
    "BlobRef",
    "BranchCause",
    "Caller",
    "DeadLetter",
    "Dropped",
    "EndReason",
    "EngineIdentity",
    "EngineMeasured",
    "EpisodeEnded",
    "EpisodeFailed",
    "EpisodeLimits",
    "EpisodeRequested",
    "EpisodeSealed",
    "EpisodeStarted",
    "Fact",
    "FailReason",
    "FinishReason",
    "GroupClosed",
    "GroupOpened",
    "HarnessIdentity",
    "Isolation",
    "LagCount",
    "Member",
    "PolicyPublished",
    "PolicyServed",
    "Purpose",
    "RetireReason",
    "RunPaused",
    "RunStopped",
    "RunSubmitted",
    "Sampling",
    "Sequence",
    "Span",
    "StopReason",
    "TaskRef",
    "Timing",
    "TrajectoryRetired",
    "TrajectoryVerified",
    "TurnRecorded",
    "TurnStatus",
    "Usage",
    "VersionSpan",
    "common_length",
    "count",
    "covered",
    "env_token",
    "key_entry",
    "pack_ids",
    "pack_logprobs",
    "spans_of",
    "token",
    "unpack_ids",
    "unpack_logprobs",
]
