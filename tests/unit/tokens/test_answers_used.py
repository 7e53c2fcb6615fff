"""Which of several answers to a question count."""

import itertools

import msgspec
import pytest
from merging import ABANDONED, ABORTED, DELIVERED, a_turn, merged_of, trained_in

from openforge.protos import (
    BranchCause,
    Dropped,
    HarnessIdentity,
    TurnRecorded,
    TurnStatus,
    unpack_ids,
)
from openforge.tokens import Merged, merge, rebuild


def test_an_answer_that_was_asked_for_again_is_counted_as_superseded() -> None:
    merged = merged_of(
        a_turn(0, [1], [2]),
        a_turn(1, [], [3], parent=0, prefix=1, cause=BranchCause.RESAMPLED),
        a_turn(2, [4], [5], parent=1, prefix=2),
    )
    assert trained_in(merged) == [[3, 5]]
    assert merged.dropped == (Dropped(reason="superseded", tokens=1),)
    assert merged.delivered_fraction == 2 / 3


def test_the_answer_that_the_harness_went_on_from_counts_even_if_it_asked_again() -> None:
    merged = merged_of(
        a_turn(0, [1], [2]),
        a_turn(1, [], [3], parent=0, prefix=1, cause=BranchCause.RESAMPLED),
        a_turn(2, [4], [5], parent=0, prefix=2),
    )
    assert trained_in(merged) == [[2, 5]]
    assert merged.dropped == (Dropped(reason="superseded", tokens=1),)


def test_of_answers_that_nothing_went_on_from_the_last_one_read_counts() -> None:
    merged = merged_of(
        a_turn(0, [1], [2]),
        a_turn(1, [], [3], parent=0, prefix=1, cause=BranchCause.RESAMPLED),
        a_turn(2, [], [4], parent=0, prefix=1, cause=BranchCause.RESAMPLED, status=ABORTED),
    )
    assert trained_in(merged) == [[3]]
    assert merged.dropped == (Dropped(reason="aborted", tokens=1), Dropped(reason="superseded", tokens=1))


def _twins() -> list[TurnRecorded]:
    """Turns 1 and 2 answer the same call, which was made twice before either was told."""
    return [
        a_turn(0, [1], [2]),
        a_turn(1, [3], [4], parent=0, prefix=2, digest="d"),
        a_turn(2, [3], [5], parent=0, prefix=2, digest="d", cause=BranchCause.UNKNOWN),
    ]


def _sent_twice(*after: TurnRecorded) -> Merged:
    return merged_of(*_twins(), *after)


@pytest.mark.parametrize(("used", "status"), [*itertools.product((1, 2), (DELIVERED, ABORTED))])
def test_of_a_call_that_was_sent_twice_only_the_answer_that_was_used_is_trained(used: int, status: TurnStatus) -> None:
    """A request that goes on from it shows that it was used, whatever became of that request."""
    merged = _sent_twice(a_turn(3, [6], [7], parent=used, prefix=4, status=status))
    assert trained_in(merged) == [[2, used + 3, 7] if status is DELIVERED else [2, used + 3]]
    assert Dropped(reason="superseded", tokens=1) in merged.dropped


def test_answers_of_which_each_was_used_are_all_trained_though_the_call_was_the_same() -> None:
    merged = _sent_twice(a_turn(3, [6], [7], parent=1, prefix=4), a_turn(4, [6], [8], parent=2, prefix=4))
    assert sorted(trained_in(merged)) == [[2, 4, 7], [5, 8]]
    assert merged.dropped == ()


def test_answers_that_nothing_went_on_from_are_ambiguous_where_the_call_was_sent_several_times_at_once() -> None:
    """Which of them was read nobody can know: none is trained as if it was used, unless the run says that all were."""
    merged = _sent_twice()
    assert trained_in(merged) == [[2]]
    assert merged.dropped == (Dropped(reason="ambiguous", tokens=2),)
    everything = merge(rebuild(_twins()), ambiguous=True)
    assert sorted(trained_in(everything)) == [[2, 4], [5]]
    assert everything.dropped == ()


def test_of_equal_answers_to_a_call_that_was_sent_twice_one_is_trained_whichever_was_read() -> None:
    merged = merged_of(a_turn(0, [1], [2], digest="d"), a_turn(1, [1], [2], digest="d"))
    assert trained_in(merged) == [[2]]
    assert merged.dropped == (Dropped(reason="superseded", tokens=1),)


@pytest.mark.parametrize("shown", [4, 5])
def test_an_answer_is_used_if_it_stands_in_a_later_prompt_where_the_question_stood(shown: int) -> None:
    """As where a harness ends each prompt with a note that is gone in the next one: 7 is the note, 8 a header."""
    merged = merged_of(
        a_turn(0, [1, 7, 8], [4, 2], digest="d"),
        a_turn(1, [1, 7, 8], [5, 2], digest="d"),
        a_turn(2, [8, shown, 2, 6, 7, 8], [3], parent=0, prefix=1, cause=BranchCause.TRANSIENT),
    )
    assert sorted(trained_in(merged)) == [[3], [shown, 2]]
    assert merged.dropped == (Dropped(reason="superseded", tokens=2),)


def test_an_answer_that_was_asked_for_again_is_not_trained_although_the_second_one_was_cut_off() -> None:
    merged = merged_of(
        a_turn(0, [1], [2]), a_turn(1, [], [3], parent=0, prefix=1, cause=BranchCause.RESAMPLED, status=ABORTED)
    )
    assert trained_in(merged) == []
    assert merged.dropped == (Dropped(reason="aborted", tokens=1), Dropped(reason="superseded", tokens=1))


def test_of_answers_that_were_asked_for_again_twice_at_once_none_is_trained() -> None:
    again = BranchCause.RESAMPLED
    merged = merged_of(
        a_turn(0, [1], [2]),
        a_turn(1, [], [3], parent=0, prefix=1, cause=again, digest="d"),
        a_turn(2, [], [4], parent=0, prefix=1, cause=again, digest="d"),
    )
    assert trained_in(merged) == []
    assert merged.dropped == (Dropped(reason="ambiguous", tokens=2), Dropped(reason="superseded", tokens=1))


def test_a_resampled_turn_continues_the_conversation_before_the_answer_it_replaces() -> None:
    merged = merged_of(
        a_turn(0, [1], [2]),
        a_turn(1, [3], [4], parent=0, prefix=2),
        a_turn(2, [], [5], parent=1, prefix=3, cause=BranchCause.RESAMPLED),
    )
    assert trained_in(merged) == [[2, 5]]


def test_an_answer_nobody_waited_for_is_dropped_unless_the_history_shows_that_it_was_read() -> None:
    turns = [a_turn(0, [1], [2], status=ABANDONED)]
    assert merged_of(*turns).dropped == (Dropped(reason="abandoned", tokens=1),)
    assert merged_of(*turns).sequences == ()
    turns.append(a_turn(1, [3], [4], parent=0, prefix=2))
    assert trained_in(merged_of(*turns)) == [[2, 4]]


def test_a_delivered_answer_is_trained_although_the_turn_after_it_was_cut_off() -> None:
    merged = merged_of(a_turn(0, [1], [2]), a_turn(1, [3], [4, 5], parent=0, prefix=2, status=ABORTED))
    assert trained_in(merged) == [[2]]
    assert unpack_ids(merged.sequences[0].ids) == [1, 2]
    assert merged.dropped == (Dropped(reason="aborted", tokens=2),)


def test_an_answer_that_came_to_nobody_is_not_trained_unless_it_was_used() -> None:
    turns = [a_turn(0, [1], [2])]
    merged = merge(rebuild(turns), orphaned=[0])
    assert (merged.sequences, merged.dropped) == ((), (Dropped(reason="orphaned", tokens=1),))
    turns.append(a_turn(1, [3], [4], parent=0, prefix=2))
    assert trained_in(merge(rebuild(turns), orphaned=[0])) == [[2, 4]]


def test_an_answer_of_which_nobody_knew_that_it_was_read_is_trained_where_a_later_prompt_holds_it() -> None:
    """None goes on from it token by token: 7 is a note for one call only. 8 and 9 are a header."""
    turns = [a_turn(0, [1, 7, 8, 9], [4, 2]), a_turn(1, [8, 9, 4, 2, 6, 7, 8, 9], [3], parent=0, prefix=1)]
    assert sorted(trained_in(merge(rebuild(turns), orphaned=[0]))) == [[3], [4, 2]]
    turns[1] = a_turn(1, [8, 9, 5, 2, 6, 7, 8, 9], [3], parent=0, prefix=1)
    merged = merge(rebuild(turns), orphaned=[0])
    assert (trained_in(merged), merged.dropped) == ([[3]], (Dropped(reason="orphaned", tokens=2),))


@pytest.mark.parametrize("note", [7, 10])
@pytest.mark.parametrize("orphaned", [[0], [1], [0, 1]])
def test_of_equal_answers_of_which_a_later_prompt_holds_one_it_is_trained_whoever_read_which(
    orphaned: list[int], note: int
) -> None:
    """The question is sent twice, or again with another note."""
    turns = [
        a_turn(0, [1, 7, 8, 9], [4, 2], digest="d"),
        a_turn(1, [1, note, 8, 9], [4, 2], digest="d" if note == 7 else "e"),
        a_turn(2, [8, 9, 4, 2, 6, 7, 8, 9], [3], parent=0, prefix=1, cause=BranchCause.TRANSIENT),
    ]
    merged = merge(rebuild(turns), orphaned=orphaned)
    assert sorted(trained_in(merged)) == [[3], [4, 2]]
    assert merged.dropped == (Dropped(reason="orphaned", tokens=2),)


def _in_other_words(second: list[int], *, reply: bytes = b'{"tool_calls": [{}]}', thread: str = "") -> Merged:
    """A call whose answer was cut after all was written, asked again with one more note, 10, and what followed."""
    turns = [
        a_turn(0, [1, 7, 8, 9], [4, 2]),
        a_turn(1, [8, 9, 4, 2, 6, 7, 8, 9], [5, 2], parent=0, prefix=1),
        a_turn(2, [8, 9, 4, 2, 6, 10, 7, 8, 9], second, parent=0, prefix=1),
        a_turn(3, [8, 9, 4, 2, 6, 8, 9, *second, 6, 7, 8, 9], [3], parent=0, prefix=1),
    ]
    turns[1] = msgspec.structs.replace(turns[1], reply=reply, harness=HarnessIdentity(thread=thread))
    return merged_of(*turns)


@pytest.mark.parametrize("second", [[11, 2], [5, 2]])
def test_a_call_for_tools_that_was_asked_for_again_in_other_words_is_not_trained_if_nothing_knows_of_it(
    second: list[int],
) -> None:
    """As where a harness asks with a rewritten prompt after a failure; the second answer may be the same."""
    merged = _in_other_words(second)
    assert sorted(trained_in(merged)) == sorted([[3], [4, 2], second])
    assert sorted(number for sequence in merged.sequences for number in sequence.turns) == [0, 2, 3]
    assert merged.dropped == (Dropped(reason="superseded", tokens=2),)


def test_an_answer_to_a_question_beside_the_conversation_is_trained_though_nothing_knows_of_it() -> None:
    assert len(_in_other_words([11, 2], reply=b"{}").sequences) == 4
    assert len(_in_other_words([11, 2], thread="another").sequences) == 4
