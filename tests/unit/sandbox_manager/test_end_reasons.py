"""How the manager names the end of an attempt."""

import pytest

from openforge.env.contract import EnvCallResult
from openforge.protos import EndReason, EpisodeLimits
from openforge.sandbox_manager.core import Broke, Exited, Late, Outcome, Raised, Returned, end_of, redacted

LIMITS = EpisodeLimits(timeout_s=10, turns=3, tokens_per_turn=16)


def censored(cause: str) -> Returned:
    return Returned(result=EnvCallResult(status="censored", cause=cause))


@pytest.mark.parametrize(
    ("outcome", "turns", "reason"),
    [
        (Exited(exit_code=0), 1, EndReason.FINISHED),
        (Exited(exit_code=0), 0, EndReason.HARNESS_BROKEN),
        (Exited(exit_code=127), 0, EndReason.HARNESS_BROKEN),
        (Exited(exit_code=1), 2, EndReason.AGENT_CRASHED),
        (Exited(exit_code=1), 3, EndReason.OUT_OF_TURNS),
        (Exited(exit_code=0), 3, EndReason.FINISHED),
        (Exited(exit_code=124, timed_out=True), 2, EndReason.OUT_OF_TIME),
        (Exited(exit_code=124, timed_out=True), 0, EndReason.OUT_OF_TIME),
        (Exited(exit_code=-9, out_of_memory=True), 2, EndReason.OUT_OF_MEMORY),
        (Exited(exit_code=0, out_of_memory=True), 2, EndReason.FINISHED),
        (Returned(result=EnvCallResult(status="finished")), 1, EndReason.FINISHED),
        (Returned(result=EnvCallResult(status="gave_up")), 1, EndReason.GAVE_UP),
        (Returned(result=EnvCallResult(status="out_of_context")), 1, EndReason.OUT_OF_CONTEXT),
        (Returned(result=EnvCallResult(status="finished")), 0, EndReason.HARNESS_BROKEN),
        (censored("model call: refused"), 1, EndReason.ENGINE_FAILED),
        (censored("model call: refused"), 3, EndReason.OUT_OF_TURNS),
        (censored("model call: refused"), 0, EndReason.ENGINE_FAILED),
        (censored("sandbox: gone"), 3, EndReason.SANDBOX_FAILED),
        (censored("the moon"), 1, EndReason.HARNESS_BROKEN),
        (Raised(text="boom"), 1, EndReason.AGENT_CRASHED),
        (Raised(text="boom"), 0, EndReason.HARNESS_BROKEN),
        (Raised(text="gone", sandbox_lost=True), 1, EndReason.SANDBOX_FAILED),
        (Late(), 2, EndReason.OUT_OF_TIME),
        (Late(), 0, EndReason.OUT_OF_TIME),
        (Broke(reason=EndReason.HOST_LOST, text=""), 2, EndReason.HOST_LOST),
    ],
)
def test_the_reason_follows_from_outcome_and_turns(outcome: Outcome, turns: int, reason: EndReason) -> None:
    assert end_of(outcome, turns, LIMITS).reason is reason


def test_only_the_last_output_is_kept() -> None:
    end = end_of(Exited(exit_code=1, output=b"x" * 9000 + b"last\xff"), 1, LIMITS)
    assert len(end.log_tail) == 4096
    assert end.log_tail.endswith("last�")


def test_a_claim_is_passed_on() -> None:
    assert end_of(Returned(result=EnvCallResult(status="finished", reward=0.25)), 1, LIMITS).claim == 0.25


def test_the_key_is_taken_out_of_texts() -> None:
    assert redacted("said of-secret twice: of-secret", "of-secret") == "said [key] twice: [key]"
    assert redacted("nothing", "") == "nothing"
