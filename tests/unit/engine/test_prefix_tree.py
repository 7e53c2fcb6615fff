"""The prefix tree: the longest prefix, with the right keys and values, within the budget."""

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openforge.engine.prefix_tree import PrefixTree, common_prefix


def _kv(tokens: list[int]) -> torch.Tensor:
    """Keys and values that say which token and which place they are of."""
    marks = torch.tensor([[token, place] for place, token in enumerate(tokens)], dtype=torch.float32)
    return marks.expand(2, 2, 1, -1, -1).clone()


def _matched(tree: PrefixTree, tokens: list[int]) -> torch.Tensor:
    pieces = tree.match(tokens, len(tokens))
    return torch.cat([piece.kv for piece in pieces], dim=3) if pieces else _kv(tokens)[:, :, :, :0]


def test_the_longest_held_prefix_is_found_with_its_keys_and_values() -> None:
    tree = PrefixTree(1000)
    for tokens in ([1, 2, 3, 4, 5], [1, 2, 3, 9, 9], [7, 7], [1, 2]):
        tree.insert(tokens, _kv(tokens))
    assert tree.tokens_held == 5 + 2 + 2
    for tokens, length in (([1, 2, 3, 4, 8], 4), ([1, 2, 3, 9, 9, 1], 5), ([7], 1), ([2], 0), ([1, 5], 1)):
        assert torch.equal(_matched(tree, tokens), _kv(tokens)[:, :, :, :length])


def test_a_match_stops_at_the_limit() -> None:
    tree = PrefixTree(1000)
    tree.insert([1, 2, 3], _kv([1, 2, 3]))
    assert sum(piece.length for piece in tree.match([1, 2, 3], 2)) == 2


def test_a_split_leaves_the_shared_part_where_it_was() -> None:
    tree = PrefixTree(1000)
    tree.insert([1, 2, 3], _kv([1, 2, 3]))
    before = tree.match([1, 2], 2)[0].kv.data_ptr()
    tree.insert([1, 2, 8], _kv([1, 2, 8]))
    assert tree.match([1, 2], 2)[0].kv.data_ptr() == before


def test_keys_that_begin_later_extend_what_is_held_and_nothing_else() -> None:
    tree = PrefixTree(1000)
    tree.insert([1, 2], _kv([1, 2]))
    longer = [1, 2, 3, 4]
    tree.insert(longer, _kv(longer)[:, :, :, 2:], kv_start=2)
    assert torch.equal(_matched(tree, longer), _kv(longer))
    other = [5, 6, 7]
    tree.insert(other, _kv(other)[:, :, :, 1:], kv_start=1)
    assert tree.match(other, 3) == []


def test_what_was_not_used_for_longest_goes_first() -> None:
    tree = PrefixTree(6)
    for tokens in ([1, 2, 3], [4, 5, 6]):
        tree.insert(tokens, _kv(tokens))
    tree.match([1, 2, 3], 3)
    tree.insert([7, 8], _kv([7, 8]))
    assert tree.match([4], 1) == []
    assert len(_matched(tree, [1, 2, 3])[0, 0, 0]) == 3
    assert tree.tokens_held == 5


def test_of_grains_only_whole_ones_are_held_and_matched() -> None:
    tree = PrefixTree(1000, grain=4)
    tree.insert(list(range(10)), _kv(list(range(10))))
    assert tree.tokens_held == 8
    assert sum(piece.length for piece in tree.match(list(range(20)), 19)) == 8
    assert sum(piece.length for piece in tree.match([0, 1, 2, 3, 4, 5, 99], 7)) == 4
    assert tree.match([0, 1, 2, 99], 4) == []


def test_what_can_never_fit_is_not_held() -> None:
    tree = PrefixTree(2)
    tree.insert([1, 2, 3], _kv([1, 2, 3]))
    assert tree.tokens_held == 0


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(5, 60))
def test_whatever_is_matched_is_true_and_the_budget_holds(seed: int, budget: int) -> None:
    luck = random.Random(seed)
    tree = PrefixTree(budget)
    for _ in range(40):
        tokens = [luck.randrange(3) for _ in range(luck.randrange(1, 12))]
        found = _matched(tree, tokens)
        assert torch.equal(found, _kv(tokens)[:, :, :, : found.shape[3]])
        tree.insert(tokens, _kv(tokens))
        assert tree.tokens_held <= budget


def test_common_prefix_counts_equal_tokens_at_the_start() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_prefix([], [1]) == 0
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    for length in range(40):
        assert common_prefix([7] * length + [1, 2], [7] * length + [3]) == length
