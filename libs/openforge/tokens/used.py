"""Which answers of an attempt the harness used.

Promises: an answer that was read to its end counts unless its question was asked more than once; then only those count
that a later prompt shows, or the one that is left where each of the others was asked again. Where several are left
and nothing shows which one was read, none counts: a guess might train an answer that nobody saw.
"""

from collections.abc import Collection, Iterable, Iterator

import msgspec

from openforge.protos import BranchCause, TurnStatus, common_length, covered, unpack_ids
from openforge.tokens.rebuild import Conversation, RebuiltTurn

_HEADER_TOKENS = 16
"""No message's header is longer."""
_BEFORE_IDS = 2
"""The end of a header, which tells an answer from the same text of somebody else's."""
_ID_BYTES = 4


class Use(msgspec.Struct, frozen=True):
    """`heads`: the turn that each turn goes on from. `ambiguous` answers were read, or others like them, who knows."""

    heads: dict[int, int | None]
    used: frozenset[int]
    ambiguous: frozenset[int]


def use_of(conversation: Conversation, orphaned: Collection[int], *, ambiguous_counts: bool) -> Use:
    """Answers that were `orphaned` came to nobody, unless a later prompt goes on from them or shows them."""
    heads = {turn.fact.turn: _continued(conversation, turn) for turn in conversation}
    told = {turn.fact.turn for turn in conversation if turn.fact.status is TurnStatus.DELIVERED}
    received = _with_held(conversation, told.difference(orphaned), told.intersection(orphaned))
    read = {number for number in received if covered(conversation.turns[number].free())}
    went_on = {head for head in heads.values() if head is not None} & _with_heads(read, heads)
    not_counted: set[int] = set()
    ambiguous: set[int] = set()
    for answers in _asked_more_than_once(conversation):
        shown = _shown(conversation, answers, went_on, received)
        left = shown or _left(conversation, answers, received)
        if len(left) > 1 and not shown:
            ambiguous |= left
        not_counted |= answers - left
    if not ambiguous_counts:
        not_counted |= ambiguous
    not_counted |= _asked_in_other_words(conversation, read - went_on, received)
    return Use(heads, frozenset(_with_heads(read - not_counted, heads)), frozenset(ambiguous))


def _continued(conversation: Conversation, turn: RebuiltTurn) -> int | None:
    """The nearest earlier turn whose prompt and whole answer this turn's prompt begins with."""
    for ancestor, shared in conversation.ancestors(turn):
        if shared >= ancestor.length:
            return ancestor.fact.turn
    return None


def _with_heads(turns: Iterable[int], heads: dict[int, int | None]) -> set[int]:
    """These turns and all that they go on from."""
    found: set[int] = set()
    for number in turns:
        current: int | None = number
        while current is not None and current not in found:
            found.add(current)
            current = heads[current]
    return found


def _with_held(conversation: Conversation, received: set[int], orphaned: set[int]) -> set[int]:
    """Also the orphaned answers that a later prompt holds: it came to somebody, then."""
    found = set(received)
    for number in sorted(orphaned):
        if _is_held(conversation, conversation.turns[number], found):
            found.add(number)
    return found


def _asked_in_other_words(conversation: Conversation, answers: Iterable[int], received: set[int]) -> set[int]:
    """Of these answers those that called for tools, of which no later prompt knows, while the harness asked again where
    it stood: it never had them. An answer without calls may be to a question that it asked beside its conversation.
    """
    found = set()
    for number in answers:
        answer = conversation.turns[number]
        if not msgspec.json.decode(answer.fact.reply or b"{}", type=_Reply).tool_calls:
            continue
        before = [turn for turn in conversation if turn.fact.turn < number]
        if not any(_times_held(answer, turn) for turn in before) or _is_held(conversation, answer, received):
            continue
        if any(_stand_alike(conversation, answer, turn) for turn in _later(conversation, answer)):
            found.add(number)
    return found


class _Reply(msgspec.Struct):
    tool_calls: tuple[msgspec.Raw, ...] = ()


def _stand_alike(conversation: Conversation, one: RebuiltTurn, other: RebuiltTurn) -> bool:
    """Whether two prompts of one thread hold the same answers."""
    return one.fact.harness.thread == other.fact.harness.thread and all(
        _times_held(one, turn) == _times_held(other, turn) for turn in conversation if turn.fact.turn < other.fact.turn
    )


def _is_held(conversation: Conversation, answer: RebuiltTurn, received: set[int]) -> bool:
    """Whether a later prompt holds it, more often than there are equal answers that were received before."""
    number, sampled = answer.fact.turn, answer.fact.sampled
    equal = [one for one in received if one != number and conversation.turns[one].fact.sampled == sampled]
    return any(
        _times_held(later, answer) > sum(one < later.fact.turn for one in equal)
        for later in _later(conversation, answer)
    )


def _later(conversation: Conversation, answer: RebuiltTurn) -> Iterator[RebuiltTurn]:
    return (turn for turn in conversation if turn.fact.turn > answer.fact.turn)


def _times_held(turn: RebuiltTurn, answer: RebuiltTurn) -> int:
    """How often the whole answer stands in the prompt, wherever, behind what stood right before it."""
    if not answer.fact.sampled:
        return 0
    message = answer.prompt[-_BEFORE_IDS * _ID_BYTES :] + answer.fact.sampled
    times, at = 0, turn.prompt.find(message)
    while at >= 0:
        times += at % _ID_BYTES == 0
        at = turn.prompt.find(message, at + 1)
    return times


def _asked_more_than_once(conversation: Conversation) -> Iterator[set[int]]:
    """The answers to each question that has several: calls with equal digests, and those that asked again."""
    group: dict[int, set[int]] = {}
    by_digest: dict[str, int] = {}
    for turn in conversation:
        number = turn.fact.turn
        group[number] = {number}
        twin = by_digest.setdefault(turn.fact.digest, number) if turn.fact.digest else number
        for other in (twin, _asked_again(conversation, turn)):
            if other is not None and group[other] is not group[number]:
                joined = group[other] | group[number]
                group |= dict.fromkeys(joined, joined)
    yield from {id(answers): answers for answers in group.values() if len(answers) > 1}.values()


def _asked_again(conversation: Conversation, turn: RebuiltTurn) -> int | None:
    """The turn whose question this one asks again, after its answer."""
    if turn.fact.cause is not BranchCause.RESAMPLED or turn.fact.parent is None:
        return None
    return turn.fact.parent if conversation.turns[turn.fact.parent].prompt == turn.prompt else None


def _shown(conversation: Conversation, answers: set[int], went_on: set[int], received: set[int]) -> set[int]:
    """The answers that later prompts show; of equal ones one, unless each was gone on from."""
    shown = answers & went_on
    ids = {conversation.turns[number].ids for number in shown}
    for number in sorted(answers & received - shown):
        turn = conversation.turns[number]
        if turn.ids not in ids and any(_shows(later, turn) for later in conversation):
            shown.add(number)
            ids.add(turn.ids)
    return shown


def _shows(later: RebuiltTurn, answer: RebuiltTurn) -> bool:
    """Whether the answer stands in a later prompt where that one and its own part: right before it, or before its
    header where its own prompt had one more message, for that call only.
    """
    sampled = answer.fact.sampled
    if later.fact.turn <= answer.fact.turn or not sampled:
        return False
    at = common_length(later.prompt, answer.prompt) * _ID_BYTES
    rest = answer.prompt[at:]
    if unpack_ids(rest).count(unpack_ids(sampled[-_ID_BYTES:])[0]) > 1:
        return False  # more than one message ends there: an answer ends as any message does
    return any(
        later.prompt.startswith(sampled, end) and rest.endswith(later.prompt[at:end])
        for end in range(at, at + (_HEADER_TOKENS + 1) * _ID_BYTES, _ID_BYTES)
    )


def _left(conversation: Conversation, answers: set[int], received: set[int]) -> set[int]:
    """The answers that were read and not told when the question was asked again, each text once."""
    asked_again = (_asked_again(conversation, conversation.turns[number]) for number in answers)
    last = max((number for number in asked_again if number is not None), default=-1)
    left = sorted((number for number in answers & received if number > last), reverse=True)
    return set({conversation.turns[number].ids: number for number in left}.values())
