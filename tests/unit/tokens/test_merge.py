"""What sequences a conversation becomes, and what stands in them."""

import random

import msgspec
from fact_examples import FACTS
from merging import a_turn, logprob_of, merged_of, trained_in

from openforge.bus.envelope import open_, seal
from openforge.protos import (
    BranchCause,
    Caller,
    Dropped,
    Span,
    TrajectoryVerified,
    TurnRecorded,
    VersionSpan,
    unpack_ids,
    unpack_logprobs,
)
from openforge.tokens import Merged, merge, rebuild

TRAJECTORY = next(fact for fact in FACTS if isinstance(fact, TrajectoryVerified))


def test_a_straight_conversation_is_one_sequence_without_extra_prefill() -> None:
    merged = merged_of(
        a_turn(0, [1, 2], [3, 4]),
        a_turn(1, [5], [6, 7], parent=0, prefix=4),
        a_turn(2, [8], [9], parent=1, prefix=7),
    )
    assert [unpack_ids(sequence.ids) for sequence in merged.sequences] == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert trained_in(merged) == [[3, 4, 6, 7, 9]]
    assert merged.sequences[0].turns == (0, 1, 2)
    assert (merged.delivered_fraction, merged.extra_prefill_ratio, merged.prompt_tokens) == (1.0, 1.0, 4)
    assert merged.breaks == {}


def test_log_probs_and_versions_stand_beside_the_tokens_they_belong_to() -> None:
    (sequence,) = merged_of(
        a_turn(0, [1], [2, 3], version=4), a_turn(1, [], [5], parent=0, prefix=3, version=6)
    ).sequences
    assert unpack_logprobs(sequence.logprobs) == [logprob_of(0, 0), logprob_of(0, 1), logprob_of(1, 0)]
    assert sequence.versions == (VersionSpan(1, 1, 4), VersionSpan(2, 1, 5), VersionSpan(3, 1, 7))


def test_a_branch_is_a_second_sequence_in_which_the_shared_prefix_is_context() -> None:
    merged = merged_of(
        a_turn(0, [1, 2], [3, 4]),
        a_turn(1, [5], [6], parent=0, prefix=4),
        a_turn(2, [7], [8], parent=0, prefix=4, cause=BranchCause.SUB_AGENT),
    )
    assert trained_in(merged) == [[3, 4, 6], [8]]
    assert merged.delivered_fraction == 1.0
    assert merged.prompt_tokens == 3 + 5
    assert merged.extra_prefill_ratio == 8 / 4
    assert merged.breaks == {BranchCause.SUB_AGENT: 1}


def test_a_rewritten_answer_is_trained_where_it_was_sampled() -> None:
    merged = merged_of(
        a_turn(0, [1, 2], [3, 4, 9]),
        a_turn(1, [5], [6], parent=0, prefix=4, cause=BranchCause.REWRITTEN),
    )
    assert sorted(trained_in(merged)) == [[3, 4, 9], [6]]
    assert merged.delivered_fraction == 1.0


def test_forced_tokens_are_in_the_sequence_but_not_in_the_loss_and_are_counted() -> None:
    merged = merged_of(a_turn(0, [1], [2, 3, 4, 5], forced=(Span(1, 2),), version=3))
    assert trained_in(merged) == [[2, 5]]
    assert unpack_logprobs(merged.sequences[0].logprobs) == [logprob_of(0, 0), logprob_of(0, 3)]
    assert merged.sequences[0].versions == (VersionSpan(1, 1, 3), VersionSpan(4, 1, 4))
    assert merged.dropped == (Dropped(reason="forced", tokens=2),)
    assert (merged.delivered_fraction, merged.prompt_tokens) == (2 / 4, 3)


def test_an_answer_without_one_free_token_is_counted_as_forced() -> None:
    merged = merged_of(a_turn(0, [1], [2, 3], forced=(Span(0, 2),)))
    assert merged.sequences == ()
    assert merged.dropped == (Dropped(reason="forced", tokens=2),)


def test_guided_answers_are_context_where_the_run_does_not_train_them() -> None:
    turns = rebuild(
        [
            a_turn(0, [1], [2, 3]),
            msgspec.structs.replace(a_turn(1, [4], [5, 6], parent=0, prefix=3), guided=True),
            a_turn(2, [7], [8], parent=1, prefix=6),
        ]
    )
    both, free = merge(turns), merge(turns, guided=False)
    assert trained_in(both) == [[2, 3, 5, 6, 8]]
    assert both.dropped == ()
    assert trained_in(free) == [[2, 3, 8]]
    assert unpack_ids(free.sequences[0].ids) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert free.dropped == (Dropped(reason="guided", tokens=2),)
    assert (free.delivered_fraction, free.prompt_tokens) == (3 / 5, 5)


def test_an_attempt_without_a_turn_has_no_sequence_and_loses_nothing() -> None:
    merged = merged_of()
    assert (merged.sequences, merged.sampled_tokens, merged.delivered_fraction) == ((), 0, 1.0)


def test_what_sequences_share_is_stored_once() -> None:
    """Ten branches over a prompt of 8,000 tokens take hardly more room on the bus than one."""
    prompt = random.Random(0).choices(range(40_000), k=8000)
    turns = [a_turn(0, prompt, [1, 2])]
    turns += [
        a_turn(number, [number], [3], parent=0, prefix=8000, cause=BranchCause.REWRITTEN) for number in range(1, 11)
    ]
    sizes = [_stored(merged_of(*turns[:branches])) for branches in (2, 11)]
    assert sizes[1] < 1.1 * sizes[0]


def _stored(merged: Merged) -> int:
    fact = msgspec.structs.replace(TRAJECTORY, sequences=merged.sequences)
    payload, encoding = seal(fact.encode(), repeats=fact.repeats())
    assert open_(bytes(payload), encoding) == fact.encode()
    return len(payload)


def test_the_number_of_sequences_is_the_least_even_where_two_answers_are_the_same() -> None:
    """Each of two equal answers is continued once: two sequences, not three."""
    merged = merged_of(
        a_turn(0, [1], [2]),
        a_turn(1, [1], [2]),
        a_turn(2, [3], [4], parent=1, prefix=2),
        a_turn(3, [5], [6], parent=1, prefix=2, cause=BranchCause.UNKNOWN),
    )
    assert sorted(trained_in(merged)) == [[2, 4], [2, 6]]


def test_callers_that_the_run_does_not_train_are_counted() -> None:
    title = msgspec.structs.replace(a_turn(1, [7], [8, 9]), caller=Caller.SIDE_CALL)
    agent = msgspec.structs.replace(a_turn(2, [5], [6]), caller=Caller.SUB_AGENT)
    turns = (a_turn(0, [1], [2]), title, agent)
    assert len(merged_of(*turns).sequences) == 3
    merged = merge(rebuild(turns), context=[Caller.SIDE_CALL, Caller.SUB_AGENT])
    assert trained_in(merged) == [[2]]
    assert merged.dropped == (Dropped(reason="side_call", tokens=2), Dropped(reason="sub_agent", tokens=1))
    assert merged.delivered_fraction == 1 / 4


def test_what_an_endpoint_said_is_counted_as_it_counted_and_never_trained() -> None:
    fact = next(fact for fact in FACTS if isinstance(fact, TurnRecorded))
    said = msgspec.structs.replace(
        fact, turn=0, parent=None, prefix=0, suffix=b"", sampled=b"", logprobs=b"", versions=(), forced=()
    )
    merged = merge(rebuild([said]))
    assert (merged.sequences, merged.sampled_tokens, merged.delivered_fraction) == ((), 3, 0.0)
    assert merged.dropped == (Dropped(reason="no_ids", tokens=3),)
