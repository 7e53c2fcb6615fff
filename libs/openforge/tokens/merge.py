"""Merges the turns of an attempt to the fewest training sequences.

Promises: every sampled token of a turn that the harness used stands in exactly one sequence, and every
other sampled token is counted with a reason; where a token stands twice because conversations
branched, it is trained once and context elsewhere; only tokens that the policy was free to choose
are in the loss.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from openforge.protos import (
    BranchCause,
    Dropped,
    Span,
    TurnStatus,
    VersionSpan,
    count,
    covered,
)
from openforge.protos import Sequence as TrainingSequence
from openforge.tokens.rebuild import Conversation, RebuiltTurn, RecordBroken

_NO_BREAK = (BranchCause.START, BranchCause.CONTINUED)
_ID_BYTES = 4


class Merged(msgspec.Struct, frozen=True, kw_only=True):
    """`prompt_tokens` are all tokens of the sequences that were not sampled there.

    `extra_prefill_ratio` is these over the least that would do, where sequences share what they have in
    common. `temperature` is that of all trained turns.
    """

    sequences: tuple[TrainingSequence, ...]
    dropped: tuple[Dropped, ...]
    sampled_tokens: int
    delivered_fraction: float
    prompt_tokens: int
    extra_prefill_ratio: float
    breaks: dict[BranchCause, int]
    temperature: float


def merge(conversation: Conversation) -> Merged:
    """The sequences to train; raises `RecordBroken` where the turns do not belong together."""
    heads = {turn.fact.turn: _continued(conversation, turn) for turn in conversation}
    used = _used(conversation, heads)
    chains = _chains(conversation, heads, used)
    sequences = tuple(_sequence(conversation.turns[chain.leaf], chain.turns) for chain in chains)
    dropped = _dropped(conversation, used)
    sampled = sum(turn.sampled_length for turn in conversation)
    delivered = sampled - sum(entry.tokens for entry in dropped)
    prompt, least = _prompt_tokens(sequences, delivered)
    return Merged(
        sequences=sequences,
        dropped=dropped,
        sampled_tokens=sampled,
        delivered_fraction=delivered / sampled if sampled else 1.0,
        prompt_tokens=prompt,
        extra_prefill_ratio=prompt / least if least > 0 else 1.0,
        breaks=dict(Counter(turn.fact.cause for turn in conversation if turn.fact.cause not in _NO_BREAK)),
        temperature=_temperature(conversation, used),
    )


class _Chain(msgspec.Struct, frozen=True):
    """A sequence to be: the ids of `leaf`, in which the answers of `turns` are trained."""

    leaf: int
    turns: list[RebuiltTurn]


def _continued(conversation: Conversation, turn: RebuiltTurn) -> int | None:
    """The nearest earlier turn whose prompt and whole answer this turn's prompt begins with."""
    for ancestor, shared in conversation.ancestors(turn):
        if shared >= ancestor.length:
            return ancestor.fact.turn
    return None


def _used(conversation: Conversation, heads: dict[int, int | None]) -> set[int]:
    """The turns that the harness worked with: those it read to the end, and those it went on from."""
    read = {
        turn.fact.turn for turn in conversation if turn.fact.status is TurnStatus.DELIVERED and _loss_tokens(turn) > 0
    }
    went_on = {heads[number] for number in _with_heads(read, heads)}
    superseded = _superseded(conversation, went_on, read)
    return _with_heads(read - superseded, heads)


def _with_heads(turns: Iterable[int], heads: dict[int, int | None]) -> set[int]:
    """These turns and all that they go on from."""
    found: set[int] = set()
    for number in turns:
        current: int | None = number
        while current is not None and current not in found:
            found.add(current)
            current = heads[current]
    return found


def _superseded(conversation: Conversation, went_on: set[int | None], read: set[int]) -> set[int]:
    """Answers to a question that was asked again, and that nothing went on from.

    Where nothing went on from any of the answers, the last one that was read counts.
    """
    superseded: set[int] = set()
    for answers in _same_question(conversation):
        kept = [number for number in answers if number in went_on] or [n for n in answers if n in read][-1:]
        superseded.update(set(answers) - set(kept))
    return superseded


def _same_question(conversation: Conversation) -> list[list[int]]:
    """Turns that were given equal prompts, where the proxy says that one of them was asked again."""
    by_prompt: dict[bytes, list[RebuiltTurn]] = {}
    for turn in conversation:
        by_prompt.setdefault(turn.prompt, []).append(turn)
    return [
        [turn.fact.turn for turn in turns]
        for turns in by_prompt.values()
        if any(turn.fact.cause is BranchCause.RESAMPLED for turn in turns)
    ]


def _chains(conversation: Conversation, heads: dict[int, int | None], used: set[int]) -> list[_Chain]:
    """One chain for each used turn that no used turn goes on from. The first to reach a turn trains it."""
    inner = {heads[number] for number in used}
    claimed: set[int] = set()
    chains = []
    for leaf in sorted(used - inner):
        path = []
        current: int | None = leaf
        while current is not None and current not in claimed:
            claimed.add(current)
            path.append(conversation.turns[current])
            current = heads[current]
        chains.append(_Chain(leaf, path[::-1]))
    return chains


def _sequence(leaf: RebuiltTurn, turns: Sequence[RebuiltTurn]) -> TrainingSequence:
    loss: list[Span] = []
    versions: list[VersionSpan] = []
    logprobs = b""
    for turn in turns:
        for span in turn.free():
            loss.append(Span(turn.prompt_length + span.start, span.length))
            logprobs += turn.fact.logprobs[span.start * _ID_BYTES : (span.start + span.length) * _ID_BYTES]
            versions += _versions_within(turn, span)
    return TrainingSequence(
        ids=leaf.ids,
        loss=tuple(loss),
        logprobs=logprobs,
        versions=tuple(versions),
        turns=tuple(turn.fact.turn for turn in turns if turn.sampled_length),
    )


def _versions_within(turn: RebuiltTurn, span: Span) -> list[VersionSpan]:
    """The version spans of these sampled tokens, as positions of the sequence."""
    found = []
    for version in turn.fact.versions:
        start = max(version.start, span.start)
        end = min(version.start + version.length, span.start + span.length)
        if start < end:
            found.append(VersionSpan(turn.prompt_length + start, end - start, version.version))
    return found


def _dropped(conversation: Conversation, used: set[int]) -> tuple[Dropped, ...]:
    tokens: Counter[str] = Counter()
    for turn in conversation:
        if turn.fact.turn not in used and turn.sampled_length:
            tokens[_why_dropped(turn)] += turn.sampled_length
    return tuple(Dropped(reason=reason, tokens=tokens[reason]) for reason in sorted(tokens))


def _why_dropped(turn: RebuiltTurn) -> str:
    if turn.fact.status is not TurnStatus.DELIVERED:
        return turn.fact.status.value
    return "superseded" if _loss_tokens(turn) else "forced"


def _loss_tokens(turn: RebuiltTurn) -> int:
    return covered(turn.free())


def _temperature(conversation: Conversation, used: set[int]) -> float:
    """One for all, since log-probs of different temperatures cannot share a loss."""
    found = {conversation.turns[number].fact.sampling.temperature for number in used}
    if len(found) > 1:
        raise RecordBroken(f"turns were sampled at {len(found)} different temperatures: {sorted(found)}")
    return found.pop() if found else next((turn.fact.sampling.temperature for turn in conversation), 1.0)


def _prompt_tokens(sequences: Sequence[TrainingSequence], sampled: int) -> tuple[int, int]:
    """How many tokens of the sequences are context, and how few would do if common beginnings were shared."""
    ids = sorted(sequence.ids for sequence in sequences)
    total = sum(count(packed) for packed in ids)
    repeated = sum(_common_tokens(first, second) for first, second in pairwise(ids))
    return total - sampled, total - repeated - sampled


def _common_tokens(first: bytes, second: bytes) -> int:
    """How many leading tokens two packed arrays share: bisection, since comparing slices is quick."""
    low, high = 0, min(count(first), count(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low * _ID_BYTES : middle * _ID_BYTES] == second[low * _ID_BYTES : middle * _ID_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
