"""Which sequences stand in one row.

Sequences that share a prefix are laid together as long as a row holds them, so that the prefix is computed once. Where
a row does not hold all of them, the smallest subtrees that fit are laid together first-fit decreasing, from the deepest
common prefix to the shallowest: what is given up is the sharing that saves least.

Promises: each sequence is in exactly one row; rows keep their bound; the same sequences give the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

WORTH_SHARING = 8
"""Branches that share less than an eighth of their tokens may be laid into several rows, so that rows are full or
no rank is idle."""
FULL = 0.95


class RowTooShort(ValueError):
    """A sequence does not fit into a row; the batcher should have retired it."""


class Bin(msgspec.Struct, frozen=True, kw_only=True):
    """A row, or a part of one: `tokens` in the tree of all its sequences, whose `parts` have `shared` tokens in common.
    A bin of one sequence has no parts."""

    tokens: int
    sequences: tuple[int, ...]
    parts: tuple[Bin, ...] = ()
    shared: int = 0


def filled(contexts: Sequence[list[int]], row_tokens: int, fill_tokens: int, ranks: int) -> list[Bin]:
    """The rows of sorted contexts, named by their place among them. Trees without a common token are laid together
    only up to `fill_tokens`. If possible there are as many rows as a multiple of `ranks`."""
    nodes: list[tuple[int, list[Bin]]] = [(0, [])]  # a path down the trie: depth, and what hangs there
    for place, ids_T in enumerate(contexts):
        if len(ids_T) > row_tokens:
            raise RowTooShort(f"a sequence of {len(ids_T)} tokens does not fit into row_tokens = {row_tokens}")
        found = [Bin(tokens=len(ids_T), sequences=(place,))]
        shared = common_prefix(ids_T, contexts[place + 1]) if place + 1 < len(contexts) else 0
        while nodes[-1][0] > shared:
            depth, parts = nodes.pop()
            bins = _first_fit_decreasing([*parts, *found], depth, row_tokens)
            found = [part for one in bins for part in _taken_apart(one, row_tokens)]
        if nodes[-1][0] < shared:
            nodes.append((shared, []))
        nodes[-1][1].extend(found)
    return _raised(_first_fit_decreasing(nodes[0][1], 0, fill_tokens), ranks)


def common_prefix(left: list[int], right: list[int]) -> int:
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    return next(index for index in range(length) if left[index] != right[index])


def _first_fit_decreasing(parts: list[Bin], shared: int, most: int) -> list[Bin]:
    """Bins of parts that have the first `shared` tokens in common."""
    bins: list[list[Bin]] = []
    room: list[int] = []
    for part in sorted(parts, key=lambda part: -part.tokens):
        size = part.tokens - shared
        fitting = next((index for index, free in enumerate(room) if size <= free), None)
        if fitting is None:
            bins.append([part])
            room.append(most - part.tokens)
        else:
            bins[fitting].append(part)
            room[fitting] -= size
    return [_joined(own, shared) for own in bins]


def _taken_apart(one: Bin, row_tokens: int) -> tuple[Bin, ...]:
    """A bin that is far from full comes apart where that costs little: rows are filled better with small parts."""
    return one.parts if _is_loose(one) and one.tokens < FULL * row_tokens else (one,)


def _joined(parts: list[Bin], shared: int) -> Bin:
    if len(parts) == 1:
        return parts[0]
    return Bin(
        tokens=sum(part.tokens - shared for part in parts) + shared,
        sequences=tuple(sequence for part in parts for sequence in part.sequences),
        parts=tuple(parts),
        shared=shared,
    )


def _raised(bins: list[Bin], ranks: int) -> list[Bin]:
    """The fullest bins halved until each of the ranks has as many: otherwise some would compute rows for nothing."""
    while len(bins) % ranks:
        fullest = max(bins, key=lambda one: _is_loose(one) * one.tokens)
        if not _is_loose(fullest):
            break
        place = bins.index(fullest)
        bins = [*bins[:place], *_halves(fullest), *bins[place + 1 :]]
    return bins


def _is_loose(one: Bin) -> bool:
    return bool(one.parts) and one.shared * WORTH_SHARING < one.tokens


def _halves(whole: Bin) -> tuple[Bin, Bin]:
    left, right = list[Bin](), list[Bin]()
    for part in sorted(whole.parts, key=lambda part: -part.tokens):
        (left if _tokens(left) <= _tokens(right) else right).append(part)
    return _joined(left, whole.shared), _joined(right, whole.shared)


def _tokens(bins: list[Bin]) -> int:
    return sum(one.tokens for one in bins)
