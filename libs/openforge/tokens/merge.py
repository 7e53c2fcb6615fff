"""Merges the turns of an attempt to the fewest training sequences.

Promises: every sampled token of a turn that the harness used stands in exactly one sequence, and every
other sampled token is counted with a reason; where a token stands twice because conversations
branched, it is trained once and context elsewhere; only tokens that the policy was free to choose
are in the loss, and those that a guide dictated are counted; no smaller number of sequences would do.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

import msgspec

from openforge.protos import (
    BlobRef,
    BranchCause,
    Caller,
    Dropped,
    Span,
    TurnStatus,
    VersionSpan,
    common_length,
    count,
    covered,
)
from openforge.protos import Sequence as TrainingSequence
from openforge.tokens.rebuild import Conversation, RebuiltTurn, RecordBroken
from openforge.tokens.used import use_of

_NO_BREAK = (BranchCause.START, BranchCause.CONTINUED)
_ID_BYTES = 4


class Merged(msgspec.Struct, frozen=True, kw_only=True):
    """`delivered_fraction` is the share of the sampled tokens that is in the loss. `prompt_tokens` are all tokens of
    the sequences that are not.

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


def merge(
    conversation: Conversation,
    *,
    context: Collection[Caller] = (),
    guided: bool = True,
    ambiguous: bool = False,
    orphaned: Collection[int] = (),
) -> Merged:
    """The sequences to train; raises `RecordBroken` where the turns do not belong together.

    Turns of the callers in `context` are not trained, `guided` ones only if it is true, answers of which nobody knows
    whether they were used only if `ambiguous` is, and neither are `orphaned` ones, whose answers came to nobody, unless
    a later prompt goes on from them or shows them.
    """
    if any(turn.fact.usage is not None for turn in conversation):
        return _without_ids(conversation)
    use = use_of(conversation, orphaned, ambiguous_counts=ambiguous)
    beside = _beside(conversation, use.heads, context, guided)
    trained = use.used - beside.keys()
    sequences = tuple(_sequence(chain, conversation) for chain in _chains(conversation, trained))
    aside = dict.fromkeys(use.ambiguous, "ambiguous") | {number: beside[number] for number in use.used & beside.keys()}
    dropped = _dropped(conversation, trained, aside, orphaned)
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
        breaks=_breaks(conversation, use.heads),
        temperature=_temperature(conversation, trained),
    )


def _without_ids(conversation: Conversation) -> Merged:
    """An endpoint that tells no ids has answered: what it counted is all that there is."""
    sampled = sum(turn.fact.sampled_tokens() for turn in conversation)
    return Merged(
        sequences=(),
        dropped=(Dropped(reason="no_ids", tokens=sampled),) if sampled else (),
        sampled_tokens=sampled,
        delivered_fraction=0.0,
        prompt_tokens=0,
        extra_prefill_ratio=1.0,
        breaks=dict(Counter(turn.fact.cause for turn in conversation if turn.fact.cause not in _NO_BREAK)),
        temperature=next(iter(conversation)).fact.sampling.temperature,
    )


class _Chain(msgspec.Struct):
    """A sequence to be: the ids of turn `leaf`, in which the answers of `turns`, the last one first, are trained.

    Nothing before position `free` is.
    """

    leaf: int
    ids: bytes
    free: int
    turns: list[RebuiltTurn]


def _caller_of(conversation: Conversation, heads: dict[int, int | None], turn: RebuiltTurn) -> Caller:
    """Whose call it was, as told or as what came later shows.

    A title may be asked for before the conversation that it is for begins. The proxy lets a second conversation
    start only where it takes what came before for such calls.
    """
    if turn.fact.caller is not Caller.MAIN:
        return turn.fact.caller
    started = [other.fact.turn for other in conversation if other.fact.cause is BranchCause.START and other.fact.tools]
    first = turn
    while (head := heads[first.fact.turn]) is not None:
        first = conversation.turns[head]
    early = first.fact.cause is BranchCause.START and not first.fact.tools
    return Caller.SIDE_CALL if early and any(number > first.fact.turn for number in started) else Caller.MAIN


def _breaks(conversation: Conversation, heads: dict[int, int | None]) -> dict[BranchCause, int]:
    """Turns that went on from no other, by cause. What began before the agent's own conversation is a side call."""
    breaks: Counter[BranchCause] = Counter()
    for turn in conversation:
        cause = turn.fact.cause
        if cause is BranchCause.START and _caller_of(conversation, heads, turn) is Caller.SIDE_CALL:
            cause = BranchCause.SIDE_CALL
        if cause not in _NO_BREAK:
            breaks[cause] += 1
    return dict(breaks)


def _beside(
    conversation: Conversation, heads: dict[int, int | None], context: Collection[Caller], guided: bool
) -> dict[int, str]:
    """The turns that are not trained whatever became of them, and why."""
    beside: dict[int, str] = {}
    for turn in conversation:
        if not guided and turn.fact.guided:
            beside[turn.fact.turn] = "guided"
        if context and (caller := _caller_of(conversation, heads, turn)) in context:
            beside[turn.fact.turn] = caller.value
    return beside


def _chains(conversation: Conversation, trained: Collection[int]) -> list[_Chain]:
    """The fewest chains of turns of which each one's prompt begins with the whole of the one before.

    From the longest turns to the shortest, each joins a chain that begins with it and trains nothing within it. All
    chains that do are the same up to there, so it does not matter which one it takes, and a new chain is begun only
    where all of them are taken, which no other choice could have avoided.
    """
    chains: list[_Chain] = []
    for turn in sorted(
        (conversation.turns[number] for number in trained), key=lambda turn: (-turn.length, turn.fact.turn)
    ):
        ids = turn.ids
        within = [chain for chain in chains if chain.ids.startswith(ids)]
        if not _loss_tokens(turn) and within:
            within[0].turns.append(turn)
            continue
        free = [chain for chain in within if chain.free >= turn.length]
        if not free:
            free = [_Chain(turn.fact.turn, ids, turn.length, [])]
            chains += free
        chain = min(free, key=lambda chain: chain.leaf)
        chain.turns.append(turn)
        chain.free = turn.prompt_length
    return sorted(chains, key=lambda chain: chain.leaf)


def _sequence(chain: _Chain, conversation: Conversation) -> TrainingSequence:
    loss: list[Span] = []
    versions: list[VersionSpan] = []
    logprobs = b""
    turns = sorted(chain.turns, key=lambda turn: (turn.length, turn.fact.turn))
    for turn in turns:
        for span in turn.free():
            loss.append(Span(turn.prompt_length + span.start, span.length))
            logprobs += turn.fact.logprobs[span.start * _ID_BYTES : (span.start + span.length) * _ID_BYTES]
            versions += _versions_within(turn, span)
    routed = list(_routed(turns, conversation))
    return TrainingSequence(
        ids=chain.ids,
        loss=tuple(loss),
        logprobs=logprobs,
        versions=tuple(versions),
        turns=tuple(turn.fact.turn for turn in turns if turn.sampled_length),
        routed_experts=tuple(ref for ref, _ in routed),
        routed_at=tuple(span for _, span in routed),
    )


def _routed(turns: Sequence[RebuiltTurn], conversation: Conversation) -> Iterator[tuple[BlobRef, Span]]:
    """What is known of the experts of a sequence's tokens: of its own turns, then of those that they went on from."""
    if all(turn.fact.routed_experts is None for turn in conversation.turns.values()):
        return
    reach = {turn.fact.turn: turn.length for turn in turns}
    for turn in reversed(turns):
        for ancestor, shared in conversation.ancestors(turn):
            reach.setdefault(ancestor.fact.turn, shared)
    for number, shared in reach.items():
        turn = conversation.turns[number]
        fact = turn.fact
        tokens = min(shared, turn.length - 1) - fact.routed_from
        if fact.routed_experts is not None and tokens > 0:
            yield fact.routed_experts, Span(fact.routed_from, tokens)


def _versions_within(turn: RebuiltTurn, span: Span) -> list[VersionSpan]:
    """The version spans of these sampled tokens, as positions of the sequence."""
    found = []
    for version in turn.fact.versions:
        start = max(version.start, span.start)
        end = min(version.start + version.length, span.start + span.length)
        if start < end:
            found.append(VersionSpan(turn.prompt_length + start, end - start, version.version))
    return found


def _dropped(
    conversation: Conversation,
    trained: Collection[int],
    aside: dict[int, str],
    orphaned: Collection[int],
) -> tuple[Dropped, ...]:
    tokens: Counter[str] = Counter()
    for turn in conversation:
        if turn.fact.turn in trained:
            tokens["forced"] += covered(turn.fact.forced)
        else:
            tokens[aside.get(turn.fact.turn) or _why_dropped(turn, orphaned)] += turn.sampled_length
    return tuple(Dropped(reason=reason, tokens=tokens[reason]) for reason in sorted(+tokens))


def _why_dropped(turn: RebuiltTurn, orphaned: Collection[int]) -> str:
    if turn.fact.status is not TurnStatus.DELIVERED:
        return turn.fact.status.value
    if not _loss_tokens(turn):
        return "forced"
    return "orphaned" if turn.fact.turn in orphaned else "superseded"


def _loss_tokens(turn: RebuiltTurn) -> int:
    return covered(turn.free())


def _temperature(conversation: Conversation, used: Collection[int]) -> float:
    """One for all, since log-probs of different temperatures cannot share a loss."""
    found = {conversation.turns[number].fact.sampling.temperature for number in used}
    if len(found) > 1:
        raise RecordBroken(f"turns were sampled at {len(found)} different temperatures: {sorted(found)}")
    return found.pop() if found else next((turn.fact.sampling.temperature for turn in conversation), 1.0)


def _prompt_tokens(sequences: Sequence[TrainingSequence], trained: int) -> tuple[int, int]:
    """How many tokens of the sequences are context, and how few would do if common beginnings were shared."""
    ids = sorted(sequence.ids for sequence in sequences)
    total = sum(count(packed) for packed in ids)
    repeated = sum(common_length(first, second) for first, second in pairwise(ids))
    return total - trained, total - repeated - trained
