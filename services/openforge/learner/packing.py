"""Prefix-sharing rows: what sequences have in common is computed once.

Sequences with a common prefix become a tree of tokens: a group's prompt is one trunk and its
completions are branches that lie side by side. In depth-first order the descendants of a token are a
contiguous range, so "is an ancestor of" is two comparisons, and that is the attention mask of a row.

Promises: every loss token of every sequence is in exactly one row; a row never exceeds its bound; the
same sequences in the same order give the same rows; a token sees its own sequence up to itself and
nothing else, at its own position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from openforge.protos import BlobRef


class RowTooShort(ValueError):
    """A sequence does not fit into a row; the batcher should have retired it."""


class HasTokens(Protocol):
    @property
    def ids_T(self) -> list[int]: ...  # noqa: N802


class TrainSequence(msgspec.Struct, frozen=True, kw_only=True):
    """T ids of which the K at positions `at_K` are trained. `weight` is the share of each of them in the loss.

    `reward` is its episode's, for a critic. `part` is the mini-batch it belongs to. `images` and `routed_experts` are
    those of `openforge.protos.Sequence`, for backends that take them.
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
    routed_experts: tuple[BlobRef, ...] = ()


class Tree(msgspec.Struct, kw_only=True):
    """T tokens in depth-first order; token i has descendants i+1 .. end_T[i]-1 and stands at position_T[i].

    Loss token n is predicted at index `predictor_N[n]`, and it is token `offset` of sequence
    `sequence`, with (sequence, offset) = slot_N[n].
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


Row = Tree
"""A row is a forest: trees one after another, which nothing connects."""


def pack(
    sequences: Sequence[TrainSequence], row_tokens: int, fill_tokens: int | None = None, ranks: int = 1
) -> list[Row]:
    """Rows of at most `row_tokens`, if possible as many as a multiple of `ranks`. Trees are laid together only up to
    `fill_tokens`: on a CPU a short row is cheaper than a full one, since attention costs the square of the row."""
    trees = list(_trees(sequences, row_tokens))
    bins = _first_fit_decreasing(trees, min(fill_tokens or row_tokens, row_tokens))
    return [_forest(bin_) for bin_ in _raised(bins, ranks)]


def cost(row: HasTokens, pair_cost: float) -> float:
    """What a row costs, in tokens, if attending to one token costs `pair_cost` of a token's other work."""
    return len(row.ids_T) * (1.0 + pair_cost * len(row.ids_T))


def _trees(sequences: Sequence[TrainSequence], row_tokens: int) -> Iterator[Tree]:
    """Sorted sequences share with their neighbours whatever they share with anyone."""
    contexts = {index: _context(sequence) for index, sequence in enumerate(sequences) if sequence.at_K}
    tree, path, previous = _empty(), list[int](), list[int]()
    for index in sorted(contexts, key=lambda index: (contexts[index], index)):
        ids_T = contexts[index]
        if len(ids_T) > row_tokens:
            raise RowTooShort(f"a sequence of {len(ids_T)} tokens does not fit into row_tokens = {row_tokens}")
        shared = _common_prefix(previous, ids_T)
        if tree.ids_T and (shared == 0 or len(tree.ids_T) + len(ids_T) - shared > row_tokens):
            yield _closed(tree, path)
            tree, path, shared = _empty(), [], 0
        path = _grow(tree, path, ids_T, shared)
        _add_loss(tree, path, sequences[index], index)
        previous = ids_T
    if tree.ids_T:
        yield _closed(tree, path)


def _context(sequence: TrainSequence) -> list[int]:
    """What the last loss token is predicted from; what comes later predicts nothing."""
    return sequence.ids_T[: sequence.at_K[-1]]


def _empty() -> Tree:
    return Tree(
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


def _common_prefix(left: list[int], right: list[int]) -> int:
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    return next(index for index in range(length) if left[index] != right[index])


def _grow(tree: Tree, path: list[int], ids_T: list[int], shared: int) -> list[int]:
    """Append what `ids_T` does not share; returns its own path from the root."""
    _end(tree, path[shared:])
    first = len(tree.ids_T)
    tree.ids_T.extend(ids_T[shared:])
    tree.position_T.extend(range(shared, len(ids_T)))
    tree.end_T.extend([0] * (len(ids_T) - shared))
    return [*path[:shared], *range(first, len(tree.ids_T))]


def _end(tree: Tree, nodes: list[int]) -> None:
    """No more descendants will come below these."""
    for node in nodes:
        tree.end_T[node] = len(tree.ids_T)


def _closed(tree: Tree, path: list[int]) -> Tree:
    _end(tree, path)
    return tree


def _add_loss(tree: Tree, path: list[int], sequence: TrainSequence, index: int) -> None:
    """The one place where positions shift: the token at position t is predicted at t-1."""
    for offset, (position, mu_logprob) in enumerate(zip(sequence.at_K, sequence.mu_logprobs_K, strict=True)):
        tree.predictor_N.append(path[position - 1])
        tree.target_N.append(sequence.ids_T[position])
        tree.mu_logprobs_N.append(mu_logprob)
        tree.advantage_N.append(sequence.advantage)
        tree.weight_N.append(sequence.weight)
        tree.temperature_N.append(sequence.temperature)
        tree.slot_N.append((index, offset))


def _first_fit_decreasing(trees: list[Tree], fill_tokens: int) -> list[list[Tree]]:
    bins: list[list[Tree]] = []
    room: list[int] = []
    for tree in sorted(trees, key=lambda tree: -len(tree.ids_T)):
        size = len(tree.ids_T)
        fitting = next((index for index, free in enumerate(room) if size <= free), None)
        if fitting is None:
            bins.append([tree])
            room.append(fill_tokens - size)
        else:
            bins[fitting].append(tree)
            room[fitting] -= size
    return bins


def _raised(bins: list[list[Tree]], ranks: int) -> list[list[Tree]]:
    """The fullest bins halved until each of the ranks has as many: otherwise some would compute rows for nothing."""
    while len(bins) % ranks:
        fullest = max(range(len(bins)), key=lambda index: (len(bins[index]) > 1) * _tokens(bins[index]))
        if len(bins[fullest]) < 2:
            break
        bins = [*bins[:fullest], *_halves(bins[fullest]), *bins[fullest + 1 :]]
    return bins


def _halves(trees: list[Tree]) -> tuple[list[Tree], list[Tree]]:
    left, right = list[Tree](), list[Tree]()
    for tree in sorted(trees, key=lambda tree: -len(tree.ids_T)):
        (left if _tokens(left) <= _tokens(right) else right).append(tree)
    return left, right


def _tokens(trees: list[Tree]) -> int:
    return sum(len(tree.ids_T) for tree in trees)


def _forest(trees: list[Tree]) -> Row:
    row = _empty()
    for tree in trees:
        base = len(row.ids_T)
        row.ids_T.extend(tree.ids_T)
        row.position_T.extend(tree.position_T)
        row.end_T.extend(base + end for end in tree.end_T)
        row.predictor_N.extend(base + predictor for predictor in tree.predictor_N)
        for field in ("target_N", "mu_logprobs_N", "advantage_N", "weight_N", "temperature_N", "slot_N"):
            getattr(row, field).extend(getattr(tree, field))
    return row
