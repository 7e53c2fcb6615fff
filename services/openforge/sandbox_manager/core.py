"""Decides how an attempt ended. No clock, no bus, no sandbox."""

from typing import Literal

import msgspec

from openforge.env.contract import EnvCallResult
from openforge.env.verdict import counted
from openforge.protos import EndReason, EpisodeLimits

TAIL_BYTES = 4096
_MOST_DETAIL = 1000

_REASON_OF_STATUS = {
    "finished": EndReason.FINISHED,
    "gave_up": EndReason.GAVE_UP,
    "out_of_turns": EndReason.OUT_OF_TURNS,
    "out_of_context": EndReason.OUT_OF_CONTEXT,
    "agent_crashed": EndReason.AGENT_CRASHED,
}
_REASON_OF_CAUSE = {"sandbox": EndReason.SANDBOX_FAILED, "model call": EndReason.ENGINE_FAILED}


class Exited(msgspec.Struct, frozen=True, kw_only=True):
    """A harness that is a program in the sandbox has ended."""

    exit_code: int
    timed_out: bool = False
    out_of_memory: bool = False
    output: bytes = b""


class Returned(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline's `run` has returned."""

    result: EnvCallResult


class Raised(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline's `run` has raised; `sandbox_lost` where the sandbox was the cause."""

    text: str
    sandbox_lost: bool = False


class Broke(msgspec.Struct, frozen=True, kw_only=True):
    """Something that no policy can cause ended the attempt, or never let it begin."""

    reason: Literal[EndReason.SANDBOX_FAILED, EndReason.HOST_LOST, EndReason.HARNESS_BROKEN, EndReason.CANCELLED]
    text: str


class Late(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline was still at work at its deadline."""


Outcome = Exited | Returned | Raised | Late | Broke


class End(msgspec.Struct, frozen=True, kw_only=True):
    reason: EndReason
    detail: str = ""
    claim: float | None = None
    exit_code: int | None = None
    log_tail: str = ""
    metrics: dict[str, float] = {}


def end_of(outcome: Outcome, turns: int, limits: EpisodeLimits) -> End:
    """`turns` are the model calls recorded for the attempt.

    A harness that ends by itself before the first of them does so by no doing of the policy. One that was still at work
    is out of time, whatever it waited for: a call that has no answer yet is not recorded, so the seal alone says
    whether it had made one.
    """
    end = _end(outcome, turns, limits)
    if turns == 0 and end.reason.policy_can_cause and end.reason is not EndReason.OUT_OF_TIME:
        said = f"it ended by itself before a model call was answered ({end.reason})"
        detail = f"{said}; {end.detail}" if end.detail else said
        return msgspec.structs.replace(end, reason=EndReason.HARNESS_BROKEN, detail=detail)
    return end


def _end(outcome: Outcome, turns: int, limits: EpisodeLimits) -> End:
    match outcome:
        case Exited():
            reason = _reason_of_exit(outcome, turns, limits)
            return End(reason=reason, exit_code=outcome.exit_code, log_tail=tail(outcome.output))
        case Returned():
            result = outcome.result
            reason = _reason_of_result(result, turns, limits)
            return End(
                reason=reason, detail=result.cause[:_MOST_DETAIL], claim=result.reward, metrics=counted(result.metrics)
            )
        case Raised():
            reason = EndReason.SANDBOX_FAILED if outcome.sandbox_lost else EndReason.AGENT_CRASHED
            return End(reason=reason, detail=outcome.text[:_MOST_DETAIL])
        case Late():
            return End(reason=EndReason.OUT_OF_TIME)
        case Broke():
            return End(reason=outcome.reason, detail=outcome.text[:_MOST_DETAIL])


def _reason_of_exit(exited: Exited, turns: int, limits: EpisodeLimits) -> EndReason:
    if exited.timed_out:
        return EndReason.OUT_OF_TIME
    if exited.exit_code == 0:
        return EndReason.FINISHED
    if exited.out_of_memory:
        return EndReason.OUT_OF_MEMORY
    if turns >= limits.turns:
        return EndReason.OUT_OF_TURNS
    return EndReason.AGENT_CRASHED


def _reason_of_result(result: EnvCallResult, turns: int, limits: EpisodeLimits) -> EndReason:
    """A call beyond the last allowed turn is refused, which a harness may take for a broken model."""
    if result.status != "censored":
        return _REASON_OF_STATUS[result.status]
    what = result.cause.partition(":")[0]
    if what != "sandbox" and turns >= limits.turns:
        return EndReason.OUT_OF_TURNS
    return _REASON_OF_CAUSE.get(what, EndReason.HARNESS_BROKEN)


def tail(output: bytes) -> str:
    return output[-TAIL_BYTES:].decode("utf-8", errors="replace")


def redacted(text: str, key: str) -> str:
    """The attempt's key never leaves in a fact or a log."""
    return text.replace(key, "[key]") if key else text
