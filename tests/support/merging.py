"""Turns with ids that a test can read, and what `merge` makes of them."""

from openforge.protos import (
    BranchCause,
    EngineIdentity,
    FinishReason,
    Sampling,
    Span,
    Timing,
    TurnRecorded,
    TurnStatus,
    VersionSpan,
    pack_ids,
    pack_logprobs,
    unpack_ids,
)
from openforge.tokens import Merged, merge, rebuild

DELIVERED, ABANDONED, ABORTED = TurnStatus.DELIVERED, TurnStatus.ABANDONED, TurnStatus.ABORTED


def logprob_of(turn: int, position: int) -> float:
    """A number that names the token it belongs to, exact in float32."""
    return -(turn * 64 + position) / 1024


def a_turn(
    number: int,
    suffix: list[int],
    sampled: list[int],
    *,
    parent: int | None = None,
    prefix: int = 0,
    cause: BranchCause = BranchCause.CONTINUED,
    status: TurnStatus = DELIVERED,
    forced: tuple[Span, ...] = (),
    version: int = 0,
    digest: str = "",
) -> TurnRecorded:
    half = len(sampled) // 2
    spans = [VersionSpan(0, half, version), VersionSpan(half, len(sampled) - half, version + 1)]
    return TurnRecorded(
        run="r",
        episode="g0-0",
        attempt=0,
        turn=number,
        parent=parent,
        cause=cause if parent is not None else BranchCause.START,
        prefix=prefix,
        suffix=pack_ids(suffix),
        sampled=pack_ids(sampled),
        logprobs=pack_logprobs(logprob_of(number, position) for position in range(len(sampled))),
        versions=tuple(span for span in spans if span.length),
        forced=forced,
        digest=digest,
        finish=FinishReason.STOP,
        status=status,
        sampling=Sampling(temperature=0.7),
        engine=EngineIdentity(engine="e"),
        timing=Timing(received_at=0.0),
    )


def merged_of(*turns: TurnRecorded) -> Merged:
    return merge(rebuild(turns))


def trained_in(merged: Merged) -> list[list[int]]:
    """The ids under the loss mask of each sequence."""
    trained = []
    for sequence in merged.sequences:
        ids = unpack_ids(sequence.ids)
        trained.append([token for span in sequence.loss for token in ids[span.start : span.start + span.length]])
    return trained
