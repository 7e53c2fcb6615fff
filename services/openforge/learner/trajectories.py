"""What the learner needs of a verified trajectory: a header to decide by, sequences to train on.

Promises: a trajectory whose header says that it is sound can be packed and trained without an error;
what is wrong with the others is said in one sentence.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable

import msgspec

from openforge.learner.routing import Known
from openforge.protos import Sequence, TrajectoryVerified, unpack_ids, unpack_logprobs

SENTINEL_LOGPROB = -9000.0
"""Engines send -9999 where they have no log-prob; no sampled token can be that improbable."""

ROUNDING = 1e-3
"""How far above zero a log-prob may lie by rounding alone."""


class VersionCount(msgspec.Struct, frozen=True, array_like=True):
    """`tokens` loss tokens were sampled by weight version `version`."""

    version: int
    tokens: int


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """All of a trajectory but its tokens. `unsound` says what forbids to train it, in one sentence."""

    episode: str
    group: str
    attempt: int
    env: str
    harness: str
    reward: float
    versions: tuple[VersionCount, ...]
    sampled_tokens: int
    longest: int
    unsound: str = ""

    def loss_tokens(self) -> int:
        return sum(count.tokens for count in self.versions)

    def oldest(self) -> int | None:
        return min((count.version for count in self.versions), default=None)


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence unpacked. Loss token k stands at position `at_K[k]` of the T ids. `known` is of their experts."""

    ids_T: list[int]
    at_K: list[int]
    logprobs_K: list[float]
    versions_K: list[int]
    images: tuple[str, ...] = ()
    known: Known = ()


class Unsound(ValueError):
    """The numbers of a sequence contradict one another, or no engine may send them."""


def header_of(verified: TrajectoryVerified, vocabulary: int, takes: frozenset[str] = frozenset()) -> Header:
    """The header of a verdict; a fault of its tokens is found here, once, and not in the step.

    `takes` is what the backend can use beside tokens.
    """
    unsound, longest, versions = "", 0, Counter[int]()
    try:
        _check_scalars(verified)
        for sequence in verified.sequences:
            _check_taken(sequence, takes)
            tokens = unpack(sequence, vocabulary)
            longest = max(longest, len(tokens.ids_T))
            versions.update(tokens.versions_K)
    except Unsound as fault:
        unsound = str(fault)
    return Header(
        episode=verified.episode,
        group=verified.group,
        attempt=verified.attempt,
        env=verified.task.env,
        harness=verified.harness,
        reward=verified.reward,
        versions=tuple(VersionCount(version, tokens) for version, tokens in sorted(versions.items())),
        sampled_tokens=verified.sampled_tokens,
        longest=longest,
        unsound=unsound,
    )


def _check_scalars(verified: TrajectoryVerified) -> None:
    if not math.isfinite(verified.reward):
        raise Unsound(f"reward = {verified.reward} is not a number to compare")
    if verified.sequences and not verified.temperature > 0:
        raise Unsound(f"temperature = {verified.temperature}: only what was sampled above 0 has a gradient")


def _check_taken(sequence: Sequence, takes: frozenset[str]) -> None:
    """Without its images a sequence is another one; without its experts it is the same, forwarded otherwise."""
    if sequence.images and "images" not in takes:
        raise Unsound(f"{len(sequence.images)} images belong to its tokens, and the learner's backend takes text alone")


def unpack(sequence: Sequence, vocabulary: int) -> Tokens:
    """The numbers of a sequence; raises `Unsound`."""
    if len(sequence.ids) % 4 or len(sequence.logprobs) % 4:
        raise Unsound("a packed array is no multiple of 4 bytes long")
    ids_T = unpack_ids(sequence.ids)
    at_K = [position for span in sequence.loss for position in range(span.start, span.start + span.length)]
    logprobs_K = unpack_logprobs(sequence.logprobs)
    _check_ids(ids_T, vocabulary)
    _check_loss(at_K, len(ids_T))
    _check_logprobs(logprobs_K, len(at_K))
    return Tokens(
        ids_T=ids_T,
        at_K=at_K,
        logprobs_K=logprobs_K,
        versions_K=_versions(sequence, at_K),
        images=sequence.images,
        known=_known(sequence, len(ids_T)),
    )


def _known(sequence: Sequence, length: int) -> Known:
    if len(sequence.routed_experts) != len(sequence.routed_at):
        raise Unsound(f"{len(sequence.routed_experts)} files of experts, and spans for {len(sequence.routed_at)}")
    for span in sequence.routed_at:
        if span.start < 0 or span.length < 1 or span.start + span.length > length:
            raise Unsound(f"experts are said of tokens {span.start}..{span.start + span.length - 1} of {length}")
    return tuple(zip(sequence.routed_experts, sequence.routed_at, strict=True))


def _check_ids(ids_T: list[int], vocabulary: int) -> None:
    strange = [token for token in (min(ids_T, default=0), max(ids_T, default=0)) if not 0 <= token < vocabulary]
    if strange:
        raise Unsound(f"token id {strange[0]} is outside the model's vocabulary of {vocabulary}")


def _check_loss(at_K: list[int], length: int) -> None:
    if any(later <= earlier for earlier, later in itertools.pairwise(at_K)):
        raise Unsound("the loss spans overlap or are out of order")
    if at_K and not (at_K[0] >= 1 and at_K[-1] < length):
        raise Unsound(f"loss positions {at_K[0]}..{at_K[-1]} do not lie within 1..{length - 1}")


def _check_logprobs(logprobs_K: list[float], expected: int) -> None:
    if len(logprobs_K) != expected:
        raise Unsound(f"{len(logprobs_K)} log-probs for {expected} loss tokens")
    for logprob in logprobs_K:
        if not SENTINEL_LOGPROB < logprob <= ROUNDING:
            raise Unsound(f"log-prob {logprob} is none that an engine may send")


def _versions(sequence: Sequence, at_K: Iterable[int]) -> list[int]:
    version_of = {
        position: span.version for span in sequence.versions for position in range(span.start, span.start + span.length)
    }
    try:
        return [version_of[position] for position in at_K]
    except KeyError as missing:
        raise Unsound(f"no weight version is recorded for the loss token at {missing.args[0]}") from None
