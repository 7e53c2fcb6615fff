import pytest
from attempts import TURN_TOKENS, changed, command, conversation, ended, requested, sealed

from openforge.env.verdict import Scored
from openforge.protos import (
    BranchCause,
    Caller,
    Dropped,
    EndReason,
    FailReason,
    Span,
    TurnRecorded,
    TurnStatus,
    covered,
)
from openforge.runs.config import TrainingSection
from openforge.verifier.core import (
    Claimed,
    Evidence,
    Failure,
    Record,
    ToCheck,
    failed,
    record_of,
    rewarded_by,
    verified,
)

REQUEST = requested("shell", "rename")
TURNS = conversation(REQUEST, command("ls"), command("mv a b"))


def _evidence(
    reason: EndReason = EndReason.FINISHED, turns: list[TurnRecorded] | None = None, **sealing: int
) -> Evidence:
    turns = TURNS if turns is None else turns
    seal = sealed(REQUEST, len(turns), **sealing)
    return Evidence(requested=REQUEST, ended=ended(REQUEST, reason), sealed=seal, turns=tuple(turns))


@pytest.mark.parametrize("reason", [reason for reason in EndReason if reason.policy_can_cause])
def test_whatever_the_policy_can_cause_is_a_record(reason: EndReason) -> None:
    assert isinstance(record_of(_evidence(reason)), Record)


@pytest.mark.parametrize("reason", [reason for reason in EndReason if not reason.policy_can_cause])
def test_whatever_it_cannot_cause_is_a_failure_of_that_name_whose_tokens_are_counted(reason: EndReason) -> None:
    evidence = _evidence(reason)
    failure = record_of(evidence)
    assert isinstance(failure, Failure)
    fact = failed(evidence, failure)
    assert fact.reason.value == reason.value
    assert fact.sampled_tokens == 2 * TURN_TOKENS


def test_an_answer_that_the_harness_never_got_is_the_engines_failure() -> None:
    failure = record_of(_evidence(engine_failures=2))
    assert failure == Failure(FailReason.ENGINE_FAILED, "2 model calls were not answered")


def test_a_record_that_contradicts_itself_is_a_failure() -> None:
    failure = record_of(_evidence(turns=[TURNS[0], changed(TURNS[1], prefix=99)]))
    assert isinstance(failure, Failure)
    assert failure.reason is FailReason.RECORD_BROKEN


def test_a_sealed_turn_that_is_not_there_is_a_failure() -> None:
    evidence = Evidence(requested=REQUEST, ended=ended(REQUEST), sealed=sealed(REQUEST, 3), turns=tuple(TURNS))
    failure = record_of(evidence)
    assert failure == Failure(FailReason.RECORD_BROKEN, "turn 2 is sealed but was not recorded")


@pytest.mark.parametrize("calls", [{"unanswered": 1}, {"engine_failures": 1}])
@pytest.mark.parametrize("reason", [EndReason.OUT_OF_TIME, EndReason.HARNESS_BROKEN])
def test_an_engine_that_never_answered_is_the_cause_however_the_wait_ended(
    reason: EndReason, calls: dict[str, int]
) -> None:
    failure = record_of(_evidence(reason, turns=[], **calls))
    assert failure == Failure(FailReason.ENGINE_FAILED, f"1 model call was not answered; it ended as {reason}")


@pytest.mark.parametrize("reason", [EndReason.OUT_OF_TIME, EndReason.HARNESS_BROKEN])
def test_a_harness_that_never_called_is_broken(reason: EndReason) -> None:
    failure = record_of(_evidence(reason, turns=[]))
    detail = f"it ended as {reason}; the proxy took no model call of it"
    assert failure == Failure(FailReason.HARNESS_BROKEN, detail)


def test_time_that_ran_out_while_the_policy_spoke_is_a_record() -> None:
    assert isinstance(record_of(_evidence(EndReason.OUT_OF_TIME, turns=TURNS[:1], unanswered=1)), Record)


@pytest.mark.parametrize("status", [TurnStatus.ABORTED, TurnStatus.ABANDONED])
def test_a_harness_that_gave_up_while_the_policy_spoke_is_a_record(status: TurnStatus) -> None:
    spoke = changed(TURNS[0], status=status)
    assert isinstance(record_of(_evidence(EndReason.HARNESS_BROKEN, turns=[spoke])), Record)


def test_an_attempt_without_one_sampled_token_is_a_broken_record() -> None:
    failure = record_of(_evidence(turns=[]))
    assert isinstance(failure, Failure)
    assert failure.reason is FailReason.RECORD_BROKEN


def test_checks_come_before_claims() -> None:
    assert rewarded_by(ended(REQUEST, claim=1.0), has_checks=True, trust_env_reward=True) == ToCheck()


def test_a_claim_counts_only_where_the_run_trusts_it() -> None:
    claim = ended(REQUEST, claim=0.5)
    assert rewarded_by(claim, has_checks=False, trust_env_reward=True) == Claimed(0.5)
    refused = rewarded_by(claim, has_checks=False, trust_env_reward=False)
    assert isinstance(refused, Failure)
    assert refused.reason is FailReason.UNTRUSTED_CLAIM
    assert "set run.trust_env_reward" in refused.detail


@pytest.mark.parametrize("claim", [None, float("nan"), float("inf"), True])
def test_a_claim_must_be_a_finite_number(claim: float | None) -> None:
    refused = rewarded_by(ended(REQUEST, claim=claim), has_checks=False, trust_env_reward=True)
    assert isinstance(refused, Failure)


def test_a_verdict_carries_all_that_training_needs() -> None:
    evidence = _evidence(EndReason.OUT_OF_TURNS)
    record = record_of(evidence)
    assert isinstance(record, Record)
    scored = Scored(reward=1.0, metrics={"score": 1.0}, wall_s=0.25)
    fact = verified(evidence, record, scored, behaviour={"behaviour_errors": 2.0}, verifier="v")
    assert (fact.reward, fact.rewarded_by, fact.ended, fact.turns) == (1.0, "verifier", EndReason.OUT_OF_TURNS, 2)
    assert (fact.sampled_tokens, fact.prompt_tokens, fact.delivered_fraction) == (2 * TURN_TOKENS, 6, 1.0)
    assert fact.metrics == {"score": 1.0, "behaviour_errors": 2.0}
    assert (fact.task, fact.harness, fact.group, fact.temperature) == (REQUEST.task, "agent", "g000000", 0.7)
    assert [covered(sequence.loss) for sequence in fact.sequences] == [2 * TURN_TOKENS]
    assert fact.oldest_version() == 2


def test_a_claimed_reward_says_so() -> None:
    evidence = _evidence(turns=[TURNS[0], changed(TURNS[1], cause=BranchCause.REWRITTEN, prefix=4)])
    record = record_of(evidence)
    assert isinstance(record, Record)
    fact = verified(evidence, record, Claimed(0.5), behaviour={}, verifier="v")
    assert (fact.reward, fact.rewarded_by, len(fact.sequences)) == (0.5, "claim", 2)
    assert fact.breaks == {BranchCause.REWRITTEN: 1}


def test_what_the_run_does_not_train_is_counted() -> None:
    title = changed(TURNS[0], turn=2, cause=BranchCause.SIDE_CALL, caller=Caller.SIDE_CALL)
    evidence = _evidence(turns=[*TURNS, title])
    everything, less = record_of(evidence), record_of(evidence, TrainingSection(side_calls="context"))
    assert isinstance(everything, Record)
    assert isinstance(less, Record)
    assert everything.merged.delivered_fraction == 1.0
    assert less.merged.dropped == (Dropped(reason="side_call", tokens=TURN_TOKENS),)


def test_guided_answers_are_trained_only_where_the_run_says_so() -> None:
    """Their log-probs are not those of the policy alone."""
    evidence = _evidence(turns=[TURNS[0], changed(TURNS[1], guided=True)])
    unsaid, said = record_of(evidence), record_of(evidence, TrainingSection(guided="train"))
    assert isinstance(unsaid, Record)
    assert isinstance(said, Record)
    assert unsaid.merged.dropped == (Dropped(reason="guided", tokens=TURN_TOKENS),)
    assert said.merged.delivered_fraction == 1.0


def test_what_a_guide_dictated_within_a_trained_answer_is_counted() -> None:
    guided = changed(TURNS[1], guided=True, forced=(Span(1, 2),))
    record = record_of(_evidence(turns=[TURNS[0], guided]), TrainingSection(guided="train"))
    assert isinstance(record, Record)
    fact = verified(_evidence(), record, Claimed(1.0), behaviour={}, verifier="v")
    assert fact.dropped == (Dropped(reason="forced", tokens=2),)
    assert [covered(sequence.loss) for sequence in fact.sequences] == [2 * TURN_TOKENS - 2]
    assert fact.delivered_fraction == 1 - 2 / (2 * TURN_TOKENS)
