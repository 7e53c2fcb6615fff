"""Rebuilds what the engine saw and sampled in each turn, from facts that hold only differences.

Promises: a rebuilt turn is exactly the ids the engine was given and answered with; a record that
contradicts itself raises `RecordBroken` and never yields a plausible guess.
"""

import math
from collections.abc import Collection, Iterable, Iterator

import msgspec

from openforge.protos import Span, TurnRecorded, count, unpack_ids, unpack_logprobs

LOGPROB_SENTINEL = -9000.0
"""Engines mark tokens they did not sample with -9999; no sampled token is that unlikely."""
_LOGPROB_ROUNDING = 1e-3

_ID_BYTES = 4


class RecordBroken(ValueError):
    """A recorded turn is missing, or contradicts another or itself."""


class RebuiltTurn(msgspec.Struct, frozen=True, kw_only=True):
    """`prompt` is what the engine was given, packed int32 ids."""

    fact: TurnRecorded
    prompt: bytes

    @property
    def ids(self) -> bytes:
        """Prompt and answer, packed."""
        return self.prompt + self.fact.sampled

    @property
    def prompt_length(self) -> int:
        return count(self.prompt)

    @property
    def sampled_length(self) -> int:
        return count(self.fact.sampled)

    @property
    def length(self) -> int:
        return self.prompt_length + self.sampled_length

    def prompt_ids(self) -> list[int]:
        return unpack_ids(self.prompt)

    def free(self) -> Iterator[Span]:
        """The sampled tokens that no guide dictated, counted from the first sampled token."""
        start = 0
        for span in self.fact.forced:
            if span.start > start:
                yield Span(start, span.start - start)
            start = span.start + span.length
        if start < self.sampled_length:
            yield Span(start, self.sampled_length - start)


class Conversation(msgspec.Struct, frozen=True):
    """The turns of one attempt by number, parents before children."""

    turns: dict[int, RebuiltTurn]

    def __iter__(self) -> Iterator[RebuiltTurn]:
        return iter(self.turns.values())

    def ancestors(self, turn: RebuiltTurn) -> Iterator[tuple[RebuiltTurn, int]]:
        """Parent, parent's parent and so on, each with how many leading tokens `turn` shares with it."""
        shared = turn.fact.prefix
        parent = turn.fact.parent
        while parent is not None:
            ancestor = self.turns[parent]
            yield ancestor, shared
            shared = min(shared, ancestor.fact.prefix)
            parent = ancestor.fact.parent


def rebuild(turns: Iterable[TurnRecorded], sealed: Collection[int] | None = None) -> Conversation:
    """The conversation of exactly the turns that were sealed, all of `turns` where that is None."""
    chosen = _chosen(turns, sealed)
    rebuilt: dict[int, RebuiltTurn] = {}
    for fact in chosen:
        _check(fact)
        rebuilt[fact.turn] = RebuiltTurn(fact=fact, prompt=_prompt(fact, rebuilt))
    return Conversation(rebuilt)


def _chosen(turns: Iterable[TurnRecorded], sealed: Collection[int] | None) -> list[TurnRecorded]:
    by_number: dict[int, TurnRecorded] = {}
    attempts = set()
    for fact in turns:
        if fact.turn in by_number:
            raise RecordBroken(f"turn {fact.turn} is recorded twice")
        by_number[fact.turn] = fact
        attempts.add((fact.run, fact.episode, fact.attempt))
    if len(attempts) > 1:
        raise RecordBroken(f"turns of {len(attempts)} attempts are mixed")
    numbers = sorted(by_number if sealed is None else set(sealed))
    missing = [number for number in numbers if number not in by_number]
    if missing:
        raise RecordBroken(f"turn {missing[0]} is sealed but was not recorded")
    return [by_number[number] for number in numbers]


def _prompt(fact: TurnRecorded, earlier: dict[int, RebuiltTurn]) -> bytes:
    if fact.parent is None:
        if fact.prefix:
            raise RecordBroken(f"turn {fact.turn} takes {fact.prefix} tokens from a parent but names none")
        return fact.suffix
    parent = earlier.get(fact.parent)
    if parent is None:
        raise RecordBroken(f"turn {fact.turn} continues turn {fact.parent}, which is no earlier turn of the attempt")
    if not 0 <= fact.prefix <= parent.length:
        raise RecordBroken(
            f"turn {fact.turn} takes {fact.prefix} tokens from turn {fact.parent}, which has {parent.length}"
        )
    return parent.ids[: fact.prefix * _ID_BYTES] + fact.suffix


def _check(fact: TurnRecorded) -> None:
    """What can be wrong with one turn by itself."""
    for name, packed in (("suffix", fact.suffix), ("sampled", fact.sampled), ("logprobs", fact.logprobs)):
        if len(packed) % _ID_BYTES:
            raise RecordBroken(f"turn {fact.turn}: {name} has {len(packed)} bytes, which is no multiple of 4")
    sampled = count(fact.sampled)
    if count(fact.logprobs) != sampled:
        raise RecordBroken(f"turn {fact.turn}: {sampled} sampled tokens but {count(fact.logprobs)} log-probs")
    if min(unpack_ids(fact.suffix + fact.sampled), default=0) < 0:
        raise RecordBroken(f"turn {fact.turn}: a token id is negative")
    _check_versions(fact, sampled)
    _check_forced(fact, sampled)
    _check_logprobs(fact)


def _check_versions(fact: TurnRecorded, sampled: int) -> None:
    position = 0
    for span in fact.versions:
        if span.start != position or span.length < 1:
            raise RecordBroken(f"turn {fact.turn}: version spans leave a gap or overlap at token {position}")
        position += span.length
    if position != sampled:
        raise RecordBroken(f"turn {fact.turn}: version spans cover {position} of {sampled} sampled tokens")


def _check_forced(fact: TurnRecorded, sampled: int) -> None:
    position = 0
    for span in fact.forced:
        if span.start < position or span.length < 1 or span.start + span.length > sampled:
            raise RecordBroken(f"turn {fact.turn}: forced spans overlap or leave the {sampled} sampled tokens")
        position = span.start + span.length


def _check_logprobs(fact: TurnRecorded) -> None:
    """Forced tokens are never trained, so any number may stand there."""
    logprobs = unpack_logprobs(fact.logprobs)
    for span in reversed(fact.forced):
        del logprobs[span.start : span.start + span.length]
    if not logprobs:
        return
    if not math.isfinite(sum(logprobs)):
        raise RecordBroken(f"turn {fact.turn}: a log-prob is not finite")
    if min(logprobs) <= LOGPROB_SENTINEL:
        raise RecordBroken(f"turn {fact.turn}: log-prob {min(logprobs):.0f} is a sentinel, not a sampled token's")
    if max(logprobs) > _LOGPROB_ROUNDING:
        raise RecordBroken(f"turn {fact.turn}: log-prob {max(logprobs):.4f} is above 0")
