"""Trajectories: verified attempts, self-contained, ready to be trained by anyone."""

import re
from functools import lru_cache
from pathlib import PurePosixPath
from typing import ClassVar, Literal

import msgspec

from openforge.protos.episode import Isolation
from openforge.protos.fact import BlobRef, Fact, Span, VersionSpan
from openforge.protos.group import Purpose, TaskRef
from openforge.protos.reasons import BranchCause, EndReason


@lru_cache(maxsize=256)
def env_token(env: str) -> str:
    """An environment as part of a subject: its name, or for the path of an `env.py` that of its folder."""
    path = PurePosixPath(env)
    name = path.parent.name if path.name == "env.py" else path.stem
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:128] or "_"


class Sequence(msgspec.Struct, frozen=True, kw_only=True):
    """One training sequence of T tokens.

    `ids`: int32 x T. `loss`: the spans of sampled tokens to train, in order. `logprobs`: float32, one per
    loss token, in order. `versions`: the weight version of each loss token, as spans over positions
    0..T. `turns`: the turns whose sampled tokens stand here. `images`: the digests of what stands at the image
    placeholders of `ids`, in order. `routed_experts`: what engines said of the experts that tokens went through, files
    as in `TurnRecorded`, those of `turns` before those of context; `routed_at`: for each of them the tokens of `ids`
    that its first rows are of. Where several tell of a token the first one holds.
    """

    ids: bytes
    loss: tuple[Span, ...]
    logprobs: bytes
    versions: tuple[VersionSpan, ...]
    turns: tuple[int, ...]
    images: tuple[str, ...] = ()
    routed_experts: tuple[BlobRef, ...] = ()
    routed_at: tuple[Span, ...] = ()


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled tokens that are in the loss of no sequence, and why."""

    reason: str
    tokens: int


class TrajectoryVerified(Fact, frozen=True, kw_only=True, tag=True):
    """A verdict: `reward` for what attempt `attempt` of `episode` did, with all that training needs.

    `rewarded_by` says whether our verifier measured the reward or the environment claimed it.
    `delivered_fraction` is the share of sampled tokens that are in the loss of a sequence; the rest is in
    `dropped`. `extra_prefill_ratio` is prompt tokens trained over the least that would do.
    """

    kind: ClassVar[str] = "trajectory"
    name: ClassVar[str] = ""
    key_length: ClassVar[int] = 3

    episode: str
    attempt: int
    group: str
    purpose: Purpose
    task: TaskRef
    harness: str
    sequences: tuple[Sequence, ...]
    temperature: float
    reward: float
    rewarded_by: Literal["verifier", "claim"] = "verifier"
    metrics: dict[str, float] = {}
    ended: EndReason
    isolation: Isolation = "full"
    turns: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    delivered_fraction: float = 1.0
    dropped: tuple[Dropped, ...] = ()
    extra_prefill_ratio: float = 1.0
    breaks: dict[BranchCause, int] = {}
    agent_s: float = 0.0
    verify_s: float = 0.0
    verifier: str = ""

    def key(self) -> tuple[str | int, ...]:
        return (env_token(self.task.env), self.harness, self.episode)

    def repeats(self) -> bool:
        """What sequences share is written once for each, and stored once."""
        return len(self.sequences) > 1

    def oldest_version(self) -> int | None:
        """The oldest weight version over the loss tokens; None where nothing was sampled."""
        versions = [span.version for sequence in self.sequences for span in sequence.versions]
        return min(versions, default=None)
