"""Decides what a sealed attempt is: a failure of ours, work to be checked, or a claim.

Promises: what the policy can cause is never a failure, what it cannot is never a reward.
"""

from collections.abc import Sequence

import msgspec

from openforge.env.verdict import Scored, number
from openforge.protos import (
    Caller,
    EndReason,
    EpisodeEnded,
    EpisodeFailed,
    EpisodeRequested,
    EpisodeSealed,
    FailReason,
    Isolation,
    TrajectoryVerified,
    TurnRecorded,
    TurnStatus,
)
from openforge.runs.config import TrainingSection
from openforge.tokens import Conversation, Merged, RecordBroken, merge, rebuild

_BEFORE_AN_ANSWER = frozenset({EndReason.HARNESS_BROKEN, EndReason.OUT_OF_TIME})
"""How an attempt ends whose first model call has no answer yet."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """All that is told of one attempt."""

    requested: EpisodeRequested
    ended: EpisodeEnded
    sealed: EpisodeSealed
    turns: tuple[TurnRecorded, ...]


class Failure(msgspec.Struct, frozen=True):
    """There will be no verdict."""

    reason: FailReason
    detail: str


class Record(msgspec.Struct, frozen=True):
    """What the policy did, token for token."""

    conversation: Conversation
    merged: Merged


class ToCheck(msgspec.Struct, frozen=True):
    """The task has checks: they say what the work is worth."""


class Claimed(msgspec.Struct, frozen=True):
    """Only the environment says what the work is worth, and the run believes it."""

    reward: float


def record_of(evidence: Evidence, training: TrainingSection = TrainingSection()) -> Record | Failure:
    """The merged turns of an attempt that ended by the policy's doing; otherwise why it failed."""
    ended, sealed = evidence.ended, evidence.sealed
    if ended.reason in _BEFORE_AN_ANSWER and not evidence.turns and not sealed.turns:
        return _unanswered(ended, sealed)
    if not ended.reason.policy_can_cause and not _cut_at_the_first_answer(evidence):
        return Failure(FailReason(ended.reason.value), ended.detail)
    if sealed.engine_failures:
        return Failure(FailReason.ENGINE_FAILED, _not_answered(sealed.engine_failures))
    try:
        conversation = rebuild(evidence.turns, sealed.turns)
        merged = merge(
            conversation,
            context=_context(training),
            guided=training.guided == "train",
            ambiguous=training.ambiguous == "train",
            orphaned=sealed.orphaned,
        )
    except RecordBroken as error:
        return Failure(FailReason.RECORD_BROKEN, str(error))
    if not any(turn.sampled_length or turn.fact.usage is not None for turn in conversation):
        return Failure(FailReason.RECORD_BROKEN, f"the attempt ended as {ended.reason} without a sampled token")
    return Record(conversation, merged)


def _cut_at_the_first_answer(evidence: Evidence) -> bool:
    """A harness that gives up while the policy speaks, before an answer is whole, looks broken to whoever saw it end.
    A policy can cause that: it may have rambled."""
    waited = evidence.ended.reason is EndReason.HARNESS_BROKEN and bool(evidence.turns)
    return waited and all(turn.status is not TurnStatus.DELIVERED for turn in evidence.turns)


def _unanswered(ended: EpisodeEnded, sealed: EpisodeSealed) -> Failure:
    """No policy did anything: the engine failed where the proxy took a call, else the harness is broken."""
    how = ended.detail or f"it ended as {ended.reason}"
    if waited := sealed.unanswered + sealed.engine_failures:
        return Failure(FailReason.ENGINE_FAILED, f"{_not_answered(waited)}; {how}")
    return Failure(FailReason.HARNESS_BROKEN, f"{how}; the proxy took no model call of it")


def _not_answered(calls: int) -> str:
    return f"{calls} model {'call was' if calls == 1 else 'calls were'} not answered"


def _context(training: TrainingSection) -> frozenset[Caller]:
    """Whose turns the run does not train."""
    said = {Caller.SIDE_CALL: training.side_calls, Caller.SUB_AGENT: training.sub_agents}
    return frozenset(caller for caller, what in said.items() if what == "context")


def rewarded_by(ended: EpisodeEnded, *, has_checks: bool, trust_env_reward: bool) -> ToCheck | Claimed | Failure:
    """Who says what the work is worth."""
    if has_checks:
        return ToCheck()
    if not trust_env_reward:
        return Failure(
            FailReason.UNTRUSTED_CLAIM,
            "the task has no checks: give it some, or set run.trust_env_reward to believe the environment",
        )
    reward = number(ended.claim)
    if reward is None:
        return Failure(FailReason.UNTRUSTED_CLAIM, f"the environment claims no number as reward: {ended.claim}")
    return Claimed(reward)


def failed(evidence: Evidence, failure: Failure) -> EpisodeFailed:
    """The failure as a fact; what was sampled for it is counted."""
    return EpisodeFailed(
        run=evidence.sealed.run,
        episode=evidence.sealed.episode,
        attempt=evidence.sealed.attempt,
        reason=failure.reason,
        detail=failure.detail[:2000],
        sampled_tokens=sampled_tokens(evidence.turns),
    )


def verified(
    evidence: Evidence,
    record: Record,
    verdict: Scored | Claimed,
    *,
    behaviour: dict[str, float],
    verifier: str,
    isolation: Isolation = "full",
) -> TrajectoryVerified:
    """The verdict as a fact, with all that training needs. `isolation` is that of the checks."""
    requested, ended, merged = evidence.requested, evidence.ended, record.merged
    checked = isinstance(verdict, Scored)
    return TrajectoryVerified(
        run=requested.run,
        episode=requested.episode,
        attempt=requested.attempt,
        group=requested.group,
        purpose=requested.purpose,
        task=requested.task,
        harness=requested.harness,
        sequences=merged.sequences,
        temperature=merged.temperature,
        reward=verdict.reward,
        rewarded_by="verifier" if checked else "claim",
        metrics=_metrics(verdict, behaviour, ended),
        ended=ended.reason,
        isolation="reduced" if checked and isolation == "reduced" else ended.isolation,
        turns=len(record.conversation.turns),
        prompt_tokens=merged.prompt_tokens,
        sampled_tokens=merged.sampled_tokens,
        delivered_fraction=merged.delivered_fraction,
        dropped=merged.dropped,
        extra_prefill_ratio=merged.extra_prefill_ratio,
        breaks=merged.breaks,
        agent_s=ended.agent_s,
        verify_s=verdict.wall_s if isinstance(verdict, Scored) else 0.0,
        verifier=verifier,
    )


def _metrics(verdict: Scored | Claimed, behaviour: dict[str, float], ended: EpisodeEnded) -> dict[str, float]:
    """What the environment counted bears its own names, so that it passes for nobody else's."""
    checked = verdict.metrics if isinstance(verdict, Scored) else {}
    return {**{f"env_{name}": value for name, value in ended.metrics.items()}, **checked, **behaviour}


def sampled_tokens(turns: Sequence[TurnRecorded]) -> int:
    return sum(turn.sampled_tokens() for turn in turns)
