"""Prefix-sharing rows: what sequences have in common is computed once.

Sequences with a common prefix become a tree of tokens: a group's prompt is one trunk and its
completions are branches that lie side by side. In depth-first order the descendants of a token are a
contiguous range, so "is an ancestor of" is two comparisons, and that is the attention mask of a row.

Promises: every loss token of every sequence is in exactly one row; a row never exceeds its bound; the
same sequences in the same order give the same rows; a token sees its own sequence up to itself and
nothing else, at its own position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from openforge.learner.bins import common_prefix, filled
from openforge.learner.routing import Routing, along


class HasTokens(Protocol):
    @property
    def ids_T(self) -> list[int]: ...  # noqa: N802


class TrainSequence(msgspec.Struct, frozen=True, kw_only=True):
    """T ids of which the K at positions `at_K` are trained. `weight` is the share of each of them in the loss.

    `reward` is its episode's, for a critic. `part` is the mini-batch it belongs to. `images` are those of
    `openforge.protos.Sequence`, `routing` says through which experts its tokens before the last trained one went, for
    backends that take them.
    """

    ids_T: list[int]
    at_K: list[int]
    mu_logprobs_K: list[float]
    advantage: float
    weight: float
    temperature: float
    reward: float = 0.0
    part: int = 0
    images: tuple[str, ...] = ()
    routing: Routing | None = None


class Row(msgspec.Struct, kw_only=True):
    """A forest of T tokens in depth-first order; token i has descendants i+1 .. end_T[i]-1 and stands at position_T[i].

    Loss token n is predicted at index `predictor_N[n]`, and it is token `offset` of sequence
    `sequence`, with (sequence, offset) = slot_N[n]. `routing` is of the T tokens: of a token that several sequences
    share the first one that knows holds.
    """

    ids_T: list[int]
    position_T: list[int]
    end_T: list[int]
    predictor_N: list[int]
    target_N: list[int]
    mu_logprobs_N: list[float]
    advantage_N: list[float]
    weight_N: list[float]
    temperature_N: list[float]
    slot_N: list[tuple[int, int]]
    routing: Routing | None = None


def pack(
    sequences: Sequence[TrainSequence], row_tokens: int, fill_tokens: int | None = None, ranks: int = 1
) -> list[Row]:
    """Rows of at most `row_tokens`, if possible as many as a multiple of `ranks`. What has nothing in common is laid
    together only up to `fill_tokens`."""
    contexts = {index: _context(sequence) for index, sequence in enumerate(sequences) if sequence.at_K}
    order = sorted(contexts, key=lambda index: (contexts[index], index))
    most = min(fill_tokens or row_tokens, row_tokens)
    bins = filled([contexts[index] for index in order], row_tokens, most, ranks)
    return [_row(sequences, contexts, [order[place] for place in sorted(one.sequences)]) for one in bins]


def cost(row: HasTokens, pair_cost: float) -> float:
    """What a row costs, in tokens, if attending to one token costs `pair_cost` of a token's other work."""
    return len(row.ids_T) * (1.0 + pair_cost * len(row.ids_T))


def _context(sequence: TrainSequence) -> list[int]:
    """What the last loss token is predicted from; what comes later predicts nothing."""
    return sequence.ids_T[: sequence.at_K[-1]]


def _row(sequences: Sequence[TrainSequence], contexts: Mapping[int, list[int]], own: Sequence[int]) -> Row:
    """Sorted sequences share with their neighbours whatever they share with anyone."""
    row, path, previous = _empty(), list[int](), list[int]()
    routed: list[tuple[list[int], Routing]] = []
    for index in own:
        path = _grow(row, path, contexts[index], common_prefix(previous, contexts[index]))
        _add_loss(row, path, sequences[index], index)
        if (routing := sequences[index].routing) is not None:
            routed.append((path, routing))
        previous = contexts[index]
    _end(row, path)
    row.routing = along(len(row.ids_T), routed)
    return row


def _empty() -> Row:
    return Row(
        ids_T=[],
        position_T=[],
        end_T=[],
        predictor_N=[],
        target_N=[],
        mu_logprobs_N=[],
        advantage_N=[],
        weight_N=[],
        temperature_N=[],
        slot_N=[],
    )


def _grow(row: Row, path: list[int], ids_T: list[int], shared: int) -> list[int]:
    """Append what `ids_T` does not share; returns its own path from the root."""
    _end(row, path[shared:])
    first = len(row.ids_T)
    row.ids_T.extend(ids_T[shared:])
    row.position_T.extend(range(shared, len(ids_T)))
    row.end_T.extend([0] * (len(ids_T) - shared))
    return [*path[:shared], *range(first, len(row.ids_T))]


def _end(row: Row, nodes: list[int]) -> None:
    """No more descendants will come below these."""
    for node in nodes:
        row.end_T[node] = len(row.ids_T)


def _add_loss(row: Row, path: list[int], sequence: TrainSequence, index: int) -> None:
    """The one place where positions shift: the token at position t is predicted at t-1."""
    for offset, (position, mu_logprob) in enumerate(zip(sequence.at_K, sequence.mu_logprobs_K, strict=True)):
        row.predictor_N.append(path[position - 1])
        row.target_N.append(sequence.ids_T[position])
        row.mu_logprobs_N.append(mu_logprob)
        row.advantage_N.append(sequence.advantage)
        row.weight_N.append(sequence.weight)
        row.temperature_N.append(sequence.temperature)
        row.slot_N.append((index, offset))
