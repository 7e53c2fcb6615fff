"""What holds of every attempt: hypothesis draws them."""

import itertools
from collections import Counter
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st
from merging import ABANDONED, ABORTED, DELIVERED, a_turn, logprob_of, merged_of

from openforge.protos import (
    BranchCause,
    Span,
    TurnRecorded,
    covered,
    unpack_ids,
    unpack_logprobs,
)
from openforge.tokens import Conversation, RebuiltTurn, merge, rebuild


@st.composite
def _attempts(draw: st.DrawFn) -> list[TurnRecorded]:
    """Trees of turns over so few token ids that branches meet again by chance."""
    token = st.integers(0, 2)
    turns: list[TurnRecorded] = []
    prompts: list[list[int]] = []
    for number in range(draw(st.integers(0, 9))):
        parent = draw(st.sampled_from([None, *range(number)])) if number else None
        suffix = draw(st.lists(token, max_size=3))
        prefix, cause = 0, BranchCause.START
        if parent is not None:
            head = prompts[parent] + unpack_ids(turns[parent].sampled)
            cause = draw(st.sampled_from([BranchCause.CONTINUED, BranchCause.REWRITTEN, BranchCause.RESAMPLED]))
            prefix = draw(st.integers(0, len(head)))
            if cause is BranchCause.CONTINUED:
                prefix = len(head)
            if cause is BranchCause.RESAMPLED:
                prefix, suffix = len(prompts[parent]), []
            prompts.append(head[:prefix] + suffix)
        else:
            prompts.append(suffix)
        sampled = draw(st.lists(token, max_size=5))
        start = draw(st.integers(0, 5))
        forced = (Span(start, 1),) if start < len(sampled) and draw(st.booleans()) else ()
        status = draw(st.sampled_from([DELIVERED, DELIVERED, ABANDONED, ABORTED]))
        digest = f"{prompts[-1]}/{draw(st.integers(0, 1))}" if draw(st.booleans()) else ""
        turns.append(
            a_turn(
                number,
                suffix,
                sampled,
                parent=parent,
                prefix=prefix,
                cause=cause,
                status=status,
                forced=forced,
                digest=digest,
            )
        )
    return turns


@given(_attempts())
def test_every_sampled_token_is_in_exactly_one_sequence_or_counted(turns: list[TurnRecorded]) -> None:
    merged = merged_of(*turns)
    trained = [number for sequence in merged.sequences for number in sequence.turns]
    assert len(trained) == len(set(trained))
    sampled = {turn.turn: len(unpack_ids(turn.sampled)) for turn in turns}
    in_sequences = sum(covered(sequence.loss) for sequence in merged.sequences)
    assert (
        in_sequences + sum(entry.tokens for entry in merged.dropped) == merged.sampled_tokens == sum(sampled.values())
    )
    assert merged.delivered_fraction == (in_sequences / merged.sampled_tokens if merged.sampled_tokens else 1.0)


@given(_attempts())
def test_sequences_reproduce_the_ids_the_log_probs_and_the_versions(turns: list[TurnRecorded]) -> None:
    conversation = rebuild(turns)
    for sequence in merge(conversation).sequences:
        ids = unpack_ids(sequence.ids)
        expected = []
        for number in sequence.turns:
            turn = conversation.turns[number]
            whole = unpack_ids(turn.ids)
            assert ids[: len(whole)] == whole
            forced = {span.start for span in turn.fact.forced}
            expected += [
                (turn.prompt_length + position, logprob_of(number, position), _version(turn.fact, position))
                for position in range(turn.sampled_length)
                if position not in forced
            ]
        positions = [span.start + offset for span in sequence.loss for offset in range(span.length)]
        versions = [span.version for span in sequence.versions for _ in range(span.length)]
        assert list(zip(positions, unpack_logprobs(sequence.logprobs), versions, strict=True)) == expected
        assert [s.start + o for s in sequence.versions for o in range(s.length)] == positions
        assert covered(sequence.loss) > 0


def _version(turn: TurnRecorded, position: int) -> int:
    return next(span.version for span in turn.versions if span.start <= position < span.start + span.length)


@given(_attempts())
def test_what_was_delivered_and_asked_for_once_is_trained(turns: list[TurnRecorded]) -> None:
    conversation = rebuild(turns)
    trained = {number for sequence in merge(conversation).sequences for number in sequence.turns}
    asked_again = {t.prompt for t in conversation if t.fact.cause is BranchCause.RESAMPLED}
    digests = Counter(turn.digest for turn in turns)
    for turn in conversation:
        free = turn.sampled_length - covered(turn.fact.forced)
        once = turn.prompt not in asked_again and (not turn.fact.digest or digests[turn.fact.digest] == 1)
        if turn.fact.status is DELIVERED and free and once:
            assert turn.fact.turn in trained


@given(_attempts(), st.sets(st.integers(0, 8)))
def test_of_several_answers_to_one_call_none_is_trained_that_no_later_prompt_shows_beside_another(
    turns: list[TurnRecorded], orphaned: set[int]
) -> None:
    """Stated anew, from the bytes alone: an answer that may have come to nobody is never taken for the used one."""
    conversation = rebuild(turns)
    trained = {number for sequence in merge(conversation, orphaned=orphaned).sequences for number in sequence.turns}
    for one, other in itertools.combinations(conversation, 2):
        if not one.fact.digest or one.fact.digest != other.fact.digest:
            continue
        unseen = {turn.fact.turn for turn in (one, other) if not _is_seen(conversation, turn)}
        assert not unseen or not {one.fact.turn, other.fact.turn} <= trained
        received = [turn for turn in (one, other) if turn.fact.status is DELIVERED and turn.fact.turn not in orphaned]
        asked_again = any(
            turn.prompt == one.prompt and turn.fact.cause is BranchCause.RESAMPLED for turn in conversation
        )
        if len(unseen) == len(received) == 2 and one.ids != other.ids and not asked_again:
            assert not unseen & trained


def _is_seen(conversation: Conversation, answer: RebuiltTurn) -> bool:
    """Whether a later prompt holds the answer at the place where it differs from the answer's own prompt."""
    ids, own = unpack_ids(answer.fact.sampled), unpack_ids(answer.prompt)
    for later in conversation:
        prompt = unpack_ids(later.prompt)
        shorter = min(len(prompt), len(own))
        part = next((at for at in range(shorter) if prompt[at] != own[at]), shorter)
        heads = [at for at in range(part, part + 17) if at == part or own[part:][part - at :] == prompt[part:at]]
        if own[part:].count(ids[-1] if ids else -1) > 1:
            continue
        if later.fact.turn > answer.fact.turn and ids and any(prompt[at : at + len(ids)] == ids for at in heads):
            return True
    return False


@given(_attempts())
def test_no_sequence_goes_on_where_another_ends(turns: list[TurnRecorded]) -> None:
    conversation = rebuild(turns)
    merged = merge(conversation)
    for first, second in itertools.permutations(merged.sequences, 2):
        if second.ids.startswith(first.ids):
            assert conversation.turns[second.turns[0]].prompt_length < len(unpack_ids(first.ids))
    assert merged.extra_prefill_ratio >= 1.0


@given(_attempts().filter(lambda turns: len(turns) <= 6))
def test_no_other_grouping_needs_fewer_sequences(turns: list[TurnRecorded]) -> None:
    """All ways to put the trained turns into sequences are tried."""
    conversation = rebuild(turns)
    merged = merge(conversation)
    trained = [number for sequence in merged.sequences for number in sequence.turns]
    free = [number for number in trained if covered(tuple(conversation.turns[number].free()))]
    assert len(merged.sequences) == min((len(groups) for groups in _groupings(conversation, free)), default=0)


def _groupings(conversation: Conversation, turns: list[int]) -> Iterator[list[list[int]]]:
    """Every way to share the turns out to sequences in which no two of them train the same token."""
    if not turns:
        yield []
        return
    last = turns[-1]
    for groups in _groupings(conversation, turns[:-1]):
        yield [*groups, [last]]
        for at, group in enumerate(groups):
            if all(_go_together(conversation.turns[last], conversation.turns[other]) for other in group):
                yield [*groups[:at], [*group, last], *groups[at + 1 :]]


def _go_together(one: RebuiltTurn, other: RebuiltTurn) -> bool:
    return one.prompt.startswith(other.ids) or other.prompt.startswith(one.ids)
