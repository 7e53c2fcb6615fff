"""Which experts were used, beside the tokens of a sequence."""

import msgspec
from merging import a_turn, merged_of, trained_in

from openforge.protos import (
    BlobRef,
    BranchCause,
    TurnRecorded,
)
from openforge.tokens import Merged


def _routed(turn: TurnRecorded, start: int) -> TurnRecorded:
    """With a file of its own, known by the turn's number."""
    return msgspec.structs.replace(turn, routed_experts=BlobRef("", turn.turn), routed_from=start)


def _routed_at(merged: Merged) -> list[list[tuple[int, int, int]]]:
    """Of each sequence: which turn's file, from which token on, for how many."""
    return [
        [(ref.size, at.start, at.length) for ref, at in zip(one.routed_experts, one.routed_at, strict=True)]
        for one in merged.sequences
    ]


def test_what_is_known_of_experts_covers_a_conversation_up_to_its_last_token() -> None:
    merged = merged_of(
        _routed(a_turn(0, [1, 2], [3, 4]), 0),
        _routed(a_turn(1, [5], [6, 7], parent=0, prefix=4), 3),
        _routed(a_turn(2, [8], [9], parent=1, prefix=7), 6),
    )
    assert _routed_at(merged) == [[(0, 0, 3), (1, 3, 3), (2, 6, 2)]]


def test_a_branch_knows_the_experts_of_its_context_from_the_turns_that_it_went_on_from() -> None:
    merged = merged_of(
        _routed(a_turn(0, [1, 2], [3, 4]), 0),
        _routed(a_turn(1, [5], [6], parent=0, prefix=4), 3),
        _routed(a_turn(2, [7], [8], parent=0, prefix=3, cause=BranchCause.SUB_AGENT), 2),
        a_turn(3, [5], [6, 2], parent=2, prefix=5),
    )
    assert trained_in(merged) == [[3, 4, 6], [8, 6, 2]]
    assert _routed_at(merged) == [[(0, 0, 3), (1, 3, 2)], [(2, 2, 2), (0, 0, 3)]]


def test_experts_of_tokens_that_a_branch_does_not_share_are_not_said_of_it() -> None:
    merged = merged_of(
        _routed(a_turn(0, [1, 2], [3, 4]), 0),
        _routed(a_turn(1, [9, 9], [6], parent=0, prefix=1, cause=BranchCause.SUB_AGENT), 0),
    )
    assert _routed_at(merged) == [[(0, 0, 3)], [(1, 0, 3), (0, 0, 1)]]
