import itertools
import random
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest
from fact_examples import FACTS
from hypothesis import given
from hypothesis import strategies as st

from openforge.bus.envelope import open_, seal
from openforge.protos import (
    BlobRef,
    BranchCause,
    Caller,
    Dropped,
    EngineIdentity,
    FinishReason,
    HarnessIdentity,
    Sampling,
    Span,
    Timing,
    TrajectoryVerified,
    TurnRecorded,
    TurnStatus,
    VersionSpan,
    covered,
    pack_ids,
    pack_logprobs,
    unpack_ids,
    unpack_logprobs,
)
from openforge.tokens import Conversation, Merged, RebuiltTurn, merge, rebuild

TRAJECTORY = next(fact for fact in FACTS if isinstance(fact, TrajectoryVerified))
DELIVERED, ABANDONED, ABORTED = TurnStatus.DELIVERED, TurnStatus.ABANDONED, TurnStatus.ABORTED


def _logprob(turn: int, position: int) -> float:
    """A number that names the token it belongs to, exact in float32."""
    return -(turn * 64 + position) / 1024


def _turn(
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
        logprobs=pack_logprobs(_logprob(number, position) for position in range(len(sampled))),
        versions=tuple(span for span in spans if span.length),
        forced=forced,
        digest=digest,
        finish=FinishReason.STOP,
        status=status,
        sampling=Sampling(temperature=0.7),
        engine=EngineIdentity(engine="e"),
        timing=Timing(received_at=0.0),
    )


def _merged(*turns: TurnRecorded) -> Merged:
    return merge(rebuild(turns))


def _trained(merged: Merged) -> list[list[int]]:
    """The ids under the loss mask of each sequence."""
    trained = []
    for sequence in merged.sequences:
        ids = unpack_ids(sequence.ids)
        trained.append([token for span in sequence.loss for token in ids[span.start : span.start + span.length]])
    return trained


def test_a_straight_conversation_is_one_sequence_without_extra_prefill() -> None:
    merged = _merged(
        _turn(0, [1, 2], [3, 4]),
        _turn(1, [5], [6, 7], parent=0, prefix=4),
        _turn(2, [8], [9], parent=1, prefix=7),
    )
    assert [unpack_ids(sequence.ids) for sequence in merged.sequences] == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert _trained(merged) == [[3, 4, 6, 7, 9]]
    assert merged.sequences[0].turns == (0, 1, 2)
    assert (merged.delivered_fraction, merged.extra_prefill_ratio, merged.prompt_tokens) == (1.0, 1.0, 4)
    assert merged.breaks == {}


def test_log_probs_and_versions_stand_beside_the_tokens_they_belong_to() -> None:
    (sequence,) = _merged(_turn(0, [1], [2, 3], version=4), _turn(1, [], [5], parent=0, prefix=3, version=6)).sequences
    assert unpack_logprobs(sequence.logprobs) == [_logprob(0, 0), _logprob(0, 1), _logprob(1, 0)]
    assert sequence.versions == (VersionSpan(1, 1, 4), VersionSpan(2, 1, 5), VersionSpan(3, 1, 7))


def test_a_branch_is_a_second_sequence_in_which_the_shared_prefix_is_context() -> None:
    merged = _merged(
        _turn(0, [1, 2], [3, 4]),
        _turn(1, [5], [6], parent=0, prefix=4),
        _turn(2, [7], [8], parent=0, prefix=4, cause=BranchCause.SUB_AGENT),
    )
    assert _trained(merged) == [[3, 4, 6], [8]]
    assert merged.delivered_fraction == 1.0
    assert merged.prompt_tokens == 3 + 5
    assert merged.extra_prefill_ratio == 8 / 4
    assert merged.breaks == {BranchCause.SUB_AGENT: 1}


def test_a_rewritten_answer_is_trained_where_it_was_sampled() -> None:
    merged = _merged(
        _turn(0, [1, 2], [3, 4, 9]),
        _turn(1, [5], [6], parent=0, prefix=4, cause=BranchCause.REWRITTEN),
    )
    assert sorted(_trained(merged)) == [[3, 4, 9], [6]]
    assert merged.delivered_fraction == 1.0


def test_an_answer_that_was_asked_for_again_is_counted_as_superseded() -> None:
    merged = _merged(
        _turn(0, [1], [2]),
        _turn(1, [], [3], parent=0, prefix=1, cause=BranchCause.RESAMPLED),
        _turn(2, [4], [5], parent=1, prefix=2),
    )
    assert _trained(merged) == [[3, 5]]
    assert merged.dropped == (Dropped(reason="superseded", tokens=1),)
    assert merged.delivered_fraction == 2 / 3


def test_the_answer_that_the_harness_went_on_from_counts_even_if_it_asked_again() -> None:
    merged = _merged(
        _turn(0, [1], [2]),
        _turn(1, [], [3], parent=0, prefix=1, cause=BranchCause.RESAMPLED),
        _turn(2, [4], [5], parent=0, prefix=2),
    )
    assert _trained(merged) == [[2, 5]]
    assert merged.dropped == (Dropped(reason="superseded", tokens=1),)


def test_of_answers_that_nothing_went_on_from_the_last_one_read_counts() -> None:
    merged = _merged(
        _turn(0, [1], [2]),
        _turn(1, [], [3], parent=0, prefix=1, cause=BranchCause.RESAMPLED),
        _turn(2, [], [4], parent=0, prefix=1, cause=BranchCause.RESAMPLED, status=ABORTED),
    )
    assert _trained(merged) == [[3]]
    assert merged.dropped == (Dropped(reason="aborted", tokens=1), Dropped(reason="superseded", tokens=1))


def _twins() -> list[TurnRecorded]:
    """Turns 1 and 2 answer the same call, which was made twice before either was told."""
    return [
        _turn(0, [1], [2]),
        _turn(1, [3], [4], parent=0, prefix=2, digest="d"),
        _turn(2, [3], [5], parent=0, prefix=2, digest="d", cause=BranchCause.UNKNOWN),
    ]


def _sent_twice(*after: TurnRecorded) -> Merged:
    return _merged(*_twins(), *after)


@pytest.mark.parametrize(("used", "status"), [*itertools.product((1, 2), (DELIVERED, ABORTED))])
def test_of_a_call_that_was_sent_twice_only_the_answer_that_was_used_is_trained(used: int, status: TurnStatus) -> None:
    """A request that goes on from it shows that it was used, whatever became of that request."""
    merged = _sent_twice(_turn(3, [6], [7], parent=used, prefix=4, status=status))
    assert _trained(merged) == [[2, used + 3, 7] if status is DELIVERED else [2, used + 3]]
    assert Dropped(reason="superseded", tokens=1) in merged.dropped


def test_answers_of_which_each_was_used_are_all_trained_though_the_call_was_the_same() -> None:
    merged = _sent_twice(_turn(3, [6], [7], parent=1, prefix=4), _turn(4, [6], [8], parent=2, prefix=4))
    assert sorted(_trained(merged)) == [[2, 4, 7], [5, 8]]
    assert merged.dropped == ()


def test_answers_that_nothing_went_on_from_are_ambiguous_where_the_call_was_sent_several_times_at_once() -> None:
    """Which of them was read nobody can know: none is trained as if it was used, unless the run says that all were."""
    merged = _sent_twice()
    assert _trained(merged) == [[2]]
    assert merged.dropped == (Dropped(reason="ambiguous", tokens=2),)
    everything = merge(rebuild(_twins()), ambiguous=True)
    assert sorted(_trained(everything)) == [[2, 4], [5]]
    assert everything.dropped == ()


def test_of_equal_answers_to_a_call_that_was_sent_twice_one_is_trained_whichever_was_read() -> None:
    merged = _merged(_turn(0, [1], [2], digest="d"), _turn(1, [1], [2], digest="d"))
    assert _trained(merged) == [[2]]
    assert merged.dropped == (Dropped(reason="superseded", tokens=1),)


@pytest.mark.parametrize("shown", [4, 5])
def test_an_answer_is_used_if_it_stands_in_a_later_prompt_where_the_question_stood(shown: int) -> None:
    """As where a harness ends each prompt with a note that is gone in the next one: 7 is the note, 8 a header."""
    merged = _merged(
        _turn(0, [1, 7, 8], [4, 2], digest="d"),
        _turn(1, [1, 7, 8], [5, 2], digest="d"),
        _turn(2, [8, shown, 2, 6, 7, 8], [3], parent=0, prefix=1, cause=BranchCause.TRANSIENT),
    )
    assert sorted(_trained(merged)) == [[3], [shown, 2]]
    assert merged.dropped == (Dropped(reason="superseded", tokens=2),)


def test_an_answer_that_was_asked_for_again_is_not_trained_although_the_second_one_was_cut_off() -> None:
    merged = _merged(
        _turn(0, [1], [2]), _turn(1, [], [3], parent=0, prefix=1, cause=BranchCause.RESAMPLED, status=ABORTED)
    )
    assert _trained(merged) == []
    assert merged.dropped == (Dropped(reason="aborted", tokens=1), Dropped(reason="superseded", tokens=1))


def test_of_answers_that_were_asked_for_again_twice_at_once_none_is_trained() -> None:
    again = BranchCause.RESAMPLED
    merged = _merged(
        _turn(0, [1], [2]),
        _turn(1, [], [3], parent=0, prefix=1, cause=again, digest="d"),
        _turn(2, [], [4], parent=0, prefix=1, cause=again, digest="d"),
    )
    assert _trained(merged) == []
    assert merged.dropped == (Dropped(reason="ambiguous", tokens=2), Dropped(reason="superseded", tokens=1))


def test_a_resampled_turn_continues_the_conversation_before_the_answer_it_replaces() -> None:
    merged = _merged(
        _turn(0, [1], [2]),
        _turn(1, [3], [4], parent=0, prefix=2),
        _turn(2, [], [5], parent=1, prefix=3, cause=BranchCause.RESAMPLED),
    )
    assert _trained(merged) == [[2, 5]]


def test_an_answer_nobody_waited_for_is_dropped_unless_the_history_shows_that_it_was_read() -> None:
    turns = [_turn(0, [1], [2], status=ABANDONED)]
    assert _merged(*turns).dropped == (Dropped(reason="abandoned", tokens=1),)
    assert _merged(*turns).sequences == ()
    turns.append(_turn(1, [3], [4], parent=0, prefix=2))
    assert _trained(_merged(*turns)) == [[2, 4]]


def test_a_delivered_answer_is_trained_although_the_turn_after_it_was_cut_off() -> None:
    merged = _merged(_turn(0, [1], [2]), _turn(1, [3], [4, 5], parent=0, prefix=2, status=ABORTED))
    assert _trained(merged) == [[2]]
    assert unpack_ids(merged.sequences[0].ids) == [1, 2]
    assert merged.dropped == (Dropped(reason="aborted", tokens=2),)


def test_forced_tokens_are_in_the_sequence_but_not_in_the_loss_and_are_counted() -> None:
    merged = _merged(_turn(0, [1], [2, 3, 4, 5], forced=(Span(1, 2),), version=3))
    assert _trained(merged) == [[2, 5]]
    assert unpack_logprobs(merged.sequences[0].logprobs) == [_logprob(0, 0), _logprob(0, 3)]
    assert merged.sequences[0].versions == (VersionSpan(1, 1, 3), VersionSpan(4, 1, 4))
    assert merged.dropped == (Dropped(reason="forced", tokens=2),)
    assert (merged.delivered_fraction, merged.prompt_tokens) == (2 / 4, 3)


def test_an_answer_without_one_free_token_is_counted_as_forced() -> None:
    merged = _merged(_turn(0, [1], [2, 3], forced=(Span(0, 2),)))
    assert merged.sequences == ()
    assert merged.dropped == (Dropped(reason="forced", tokens=2),)


def test_guided_answers_are_context_where_the_run_does_not_train_them() -> None:
    turns = rebuild(
        [
            _turn(0, [1], [2, 3]),
            msgspec.structs.replace(_turn(1, [4], [5, 6], parent=0, prefix=3), guided=True),
            _turn(2, [7], [8], parent=1, prefix=6),
        ]
    )
    both, free = merge(turns), merge(turns, guided=False)
    assert _trained(both) == [[2, 3, 5, 6, 8]]
    assert both.dropped == ()
    assert _trained(free) == [[2, 3, 8]]
    assert unpack_ids(free.sequences[0].ids) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert free.dropped == (Dropped(reason="guided", tokens=2),)
    assert (free.delivered_fraction, free.prompt_tokens) == (3 / 5, 5)


def test_an_attempt_without_a_turn_has_no_sequence_and_loses_nothing() -> None:
    merged = _merged()
    assert (merged.sequences, merged.sampled_tokens, merged.delivered_fraction) == ((), 0, 1.0)


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
            _turn(
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
    merged = _merged(*turns)
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
                (turn.prompt_length + position, _logprob(number, position), _version(turn.fact, position))
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


def test_what_sequences_share_is_stored_once() -> None:
    """Ten branches over a prompt of 8,000 tokens take hardly more room on the bus than one."""
    prompt = random.Random(0).choices(range(40_000), k=8000)
    turns = [_turn(0, prompt, [1, 2])]
    turns += [
        _turn(number, [number], [3], parent=0, prefix=8000, cause=BranchCause.REWRITTEN) for number in range(1, 11)
    ]
    sizes = [_stored(_merged(*turns[:branches])) for branches in (2, 11)]
    assert sizes[1] < 1.1 * sizes[0]


def _stored(merged: Merged) -> int:
    fact = msgspec.structs.replace(TRAJECTORY, sequences=merged.sequences)
    payload, encoding = seal(fact.encode(), repeats=fact.repeats())
    assert open_(bytes(payload), encoding) == fact.encode()
    return len(payload)


def test_the_number_of_sequences_is_the_least_even_where_two_answers_are_the_same() -> None:
    """Each of two equal answers is continued once: two sequences, not three."""
    merged = _merged(
        _turn(0, [1], [2]),
        _turn(1, [1], [2]),
        _turn(2, [3], [4], parent=1, prefix=2),
        _turn(3, [5], [6], parent=1, prefix=2, cause=BranchCause.UNKNOWN),
    )
    assert sorted(_trained(merged)) == [[2, 4], [2, 6]]


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


def test_callers_that_the_run_does_not_train_are_counted() -> None:
    title = msgspec.structs.replace(_turn(1, [7], [8, 9]), caller=Caller.SIDE_CALL)
    agent = msgspec.structs.replace(_turn(2, [5], [6]), caller=Caller.SUB_AGENT)
    turns = (_turn(0, [1], [2]), title, agent)
    assert len(_merged(*turns).sequences) == 3
    merged = merge(rebuild(turns), context=[Caller.SIDE_CALL, Caller.SUB_AGENT])
    assert _trained(merged) == [[2]]
    assert merged.dropped == (Dropped(reason="side_call", tokens=2), Dropped(reason="sub_agent", tokens=1))
    assert merged.delivered_fraction == 1 / 4


def test_an_answer_that_came_to_nobody_is_not_trained_unless_it_was_used() -> None:
    turns = [_turn(0, [1], [2])]
    merged = merge(rebuild(turns), orphaned=[0])
    assert (merged.sequences, merged.dropped) == ((), (Dropped(reason="orphaned", tokens=1),))
    turns.append(_turn(1, [3], [4], parent=0, prefix=2))
    assert _trained(merge(rebuild(turns), orphaned=[0])) == [[2, 4]]


def test_an_answer_of_which_nobody_knew_that_it_was_read_is_trained_where_a_later_prompt_holds_it() -> None:
    """None goes on from it token by token: 7 is a note for one call only. 8 and 9 are a header."""
    turns = [_turn(0, [1, 7, 8, 9], [4, 2]), _turn(1, [8, 9, 4, 2, 6, 7, 8, 9], [3], parent=0, prefix=1)]
    assert sorted(_trained(merge(rebuild(turns), orphaned=[0]))) == [[3], [4, 2]]
    turns[1] = _turn(1, [8, 9, 5, 2, 6, 7, 8, 9], [3], parent=0, prefix=1)
    merged = merge(rebuild(turns), orphaned=[0])
    assert (_trained(merged), merged.dropped) == ([[3]], (Dropped(reason="orphaned", tokens=2),))


@pytest.mark.parametrize("note", [7, 10])
@pytest.mark.parametrize("orphaned", [[0], [1], [0, 1]])
def test_of_equal_answers_of_which_a_later_prompt_holds_one_it_is_trained_whoever_read_which(
    orphaned: list[int], note: int
) -> None:
    """The question is sent twice, or again with another note."""
    turns = [
        _turn(0, [1, 7, 8, 9], [4, 2], digest="d"),
        _turn(1, [1, note, 8, 9], [4, 2], digest="d" if note == 7 else "e"),
        _turn(2, [8, 9, 4, 2, 6, 7, 8, 9], [3], parent=0, prefix=1, cause=BranchCause.TRANSIENT),
    ]
    merged = merge(rebuild(turns), orphaned=orphaned)
    assert sorted(_trained(merged)) == [[3], [4, 2]]
    assert merged.dropped == (Dropped(reason="orphaned", tokens=2),)


def _in_other_words(second: list[int], *, reply: bytes = b'{"tool_calls": [{}]}', thread: str = "") -> Merged:
    """A call whose answer was cut after all was written, asked again with one more note, 10, and what followed."""
    turns = [
        _turn(0, [1, 7, 8, 9], [4, 2]),
        _turn(1, [8, 9, 4, 2, 6, 7, 8, 9], [5, 2], parent=0, prefix=1),
        _turn(2, [8, 9, 4, 2, 6, 10, 7, 8, 9], second, parent=0, prefix=1),
        _turn(3, [8, 9, 4, 2, 6, 8, 9, *second, 6, 7, 8, 9], [3], parent=0, prefix=1),
    ]
    turns[1] = msgspec.structs.replace(turns[1], reply=reply, harness=HarnessIdentity(thread=thread))
    return _merged(*turns)


@pytest.mark.parametrize("second", [[11, 2], [5, 2]])
def test_a_call_for_tools_that_was_asked_for_again_in_other_words_is_not_trained_if_nothing_knows_of_it(
    second: list[int],
) -> None:
    """As where a harness asks with a rewritten prompt after a failure; the second answer may be the same."""
    merged = _in_other_words(second)
    assert sorted(_trained(merged)) == sorted([[3], [4, 2], second])
    assert sorted(number for sequence in merged.sequences for number in sequence.turns) == [0, 2, 3]
    assert merged.dropped == (Dropped(reason="superseded", tokens=2),)


def test_an_answer_to_a_question_beside_the_conversation_is_trained_though_nothing_knows_of_it() -> None:
    assert len(_in_other_words([11, 2], reply=b"{}").sequences) == 4
    assert len(_in_other_words([11, 2], thread="another").sequences) == 4


def test_what_an_endpoint_said_is_counted_as_it_counted_and_never_trained() -> None:
    fact = next(fact for fact in FACTS if isinstance(fact, TurnRecorded))
    said = msgspec.structs.replace(
        fact, turn=0, parent=None, prefix=0, suffix=b"", sampled=b"", logprobs=b"", versions=(), forced=()
    )
    merged = merge(rebuild([said]))
    assert (merged.sequences, merged.sampled_tokens, merged.delivered_fraction) == ((), 3, 0.0)
    assert merged.dropped == (Dropped(reason="no_ids", tokens=3),)


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
    merged = _merged(
        _routed(_turn(0, [1, 2], [3, 4]), 0),
        _routed(_turn(1, [5], [6, 7], parent=0, prefix=4), 3),
        _routed(_turn(2, [8], [9], parent=1, prefix=7), 6),
    )
    assert _routed_at(merged) == [[(0, 0, 3), (1, 3, 3), (2, 6, 2)]]


def test_a_branch_knows_the_experts_of_its_context_from_the_turns_that_it_went_on_from() -> None:
    merged = _merged(
        _routed(_turn(0, [1, 2], [3, 4]), 0),
        _routed(_turn(1, [5], [6], parent=0, prefix=4), 3),
        _routed(_turn(2, [7], [8], parent=0, prefix=3, cause=BranchCause.SUB_AGENT), 2),
        _turn(3, [5], [6, 2], parent=2, prefix=5),
    )
    assert _trained(merged) == [[3, 4, 6], [8, 6, 2]]
    assert _routed_at(merged) == [[(0, 0, 3), (1, 3, 2)], [(2, 2, 2), (0, 0, 3)]]


def test_experts_of_tokens_that_a_branch_does_not_share_are_not_said_of_it() -> None:
    merged = _merged(
        _routed(_turn(0, [1, 2], [3, 4]), 0),
        _routed(_turn(1, [9, 9], [6], parent=0, prefix=1, cause=BranchCause.SUB_AGENT), 0),
    )
    assert _routed_at(merged) == [[(0, 0, 3)], [(1, 0, 3), (0, 0, 1)]]
