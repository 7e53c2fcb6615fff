from typing import Any

import msgspec
import pytest

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
from openforge.tokens import RecordBroken, merge, rebuild

FIRST = TurnRecorded(
    run="r",
    episode="g0-0",
    attempt=0,
    turn=0,
    parent=None,
    cause=BranchCause.START,
    prefix=0,
    suffix=pack_ids([1, 2]),
    sampled=pack_ids([3, 4]),
    logprobs=pack_logprobs([-0.5, -0.25]),
    versions=(VersionSpan(0, 2, 7),),
    finish=FinishReason.STOP,
    status=TurnStatus.DELIVERED,
    sampling=Sampling(temperature=1.0),
    engine=EngineIdentity(engine="e"),
    timing=Timing(received_at=0.0),
)
SECOND = msgspec.structs.replace(FIRST, turn=1, parent=0, cause=BranchCause.CONTINUED, prefix=4, suffix=pack_ids([5]))


def _changed(fact: TurnRecorded, **changes: Any) -> TurnRecorded:
    return msgspec.structs.replace(fact, **changes)


def test_a_prompt_is_the_beginning_of_the_parent_and_the_suffix() -> None:
    turns = rebuild([SECOND, FIRST]).turns
    assert turns[0].prompt_ids() == [1, 2]
    assert turns[1].prompt_ids() == [1, 2, 3, 4, 5]
    assert unpack_ids(turns[1].ids) == [1, 2, 3, 4, 5, 3, 4]


def test_only_sealed_turns_are_rebuilt() -> None:
    assert list(rebuild([FIRST, SECOND], sealed=[0]).turns) == [0]


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (_changed(SECOND, prefix=5), "takes 5 tokens from turn 0, which has 4"),
        (_changed(SECOND, prefix=-1), "takes -1 tokens from turn 0"),
        (_changed(SECOND, parent=2), "continues turn 2, which is no earlier turn"),
        (_changed(SECOND, parent=None), "takes 4 tokens from a parent but names none"),
        (_changed(SECOND, turn=0), "turn 0 is recorded twice"),
        (_changed(SECOND, attempt=1), "turns of 2 attempts are mixed"),
        (_changed(SECOND, logprobs=pack_logprobs([-1.0])), "2 sampled tokens but 1 log-probs"),
        (_changed(SECOND, logprobs=pack_logprobs([-1.0, -9999.0])), "log-prob -9999 is a sentinel"),
        (_changed(SECOND, logprobs=pack_logprobs([-1.0, float("nan")])), "a log-prob is not finite"),
        (_changed(SECOND, logprobs=pack_logprobs([-1.0, float("-inf")])), "a log-prob is not finite"),
        (_changed(SECOND, logprobs=pack_logprobs([-1.0, 0.5])), r"log-prob 0.5000 is above 0"),
        (_changed(SECOND, suffix=b"abc"), "suffix has 3 bytes"),
        (_changed(SECOND, sampled=pack_ids([3, -4])), "a token id is negative"),
        (_changed(SECOND, versions=()), "version spans cover 0 of 2 sampled tokens"),
        (_changed(SECOND, versions=(VersionSpan(0, 1, 7), VersionSpan(0, 1, 8))), "leave a gap or overlap at token 1"),
        (_changed(SECOND, forced=(Span(1, 2),)), "forced spans overlap or leave the 2 sampled"),
    ],
)
def test_a_record_that_contradicts_itself_is_broken(turn: TurnRecorded, message: str) -> None:
    with pytest.raises(RecordBroken, match=message):
        rebuild([FIRST, turn])


def test_a_sealed_turn_that_was_not_recorded_breaks_the_record() -> None:
    with pytest.raises(RecordBroken, match="turn 1 is sealed but was not recorded"):
        rebuild([FIRST], sealed=[0, 1])


def test_a_sentinel_on_a_forced_token_does_no_harm() -> None:
    turn = _changed(FIRST, forced=(Span(1, 1),), logprobs=pack_logprobs([-0.5, -9999.0]))
    (sequence,) = merge(rebuild([turn])).sequences
    assert sequence.loss == (Span(2, 1),)


def test_turns_of_different_temperatures_are_not_merged() -> None:
    with pytest.raises(RecordBroken, match="sampled at 2 different temperatures"):
        merge(rebuild([FIRST, _changed(SECOND, sampling=Sampling(temperature=0.5))]))
