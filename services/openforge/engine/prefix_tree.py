"""What has been computed before, as a tree of token runs; each node holds the keys and values of its run, and the
experts that its tokens went through where these are recorded.

Promises: a match is the longest prefix that the tree holds; the tokens held never exceed the budget;
the tree belongs to one set of weights and is thrown away with it, so nobody ever reads another version's; what is
held and matched are whole grains.
"""

from collections.abc import Sequence

import torch

from openforge.engine.routed import Chosen

TOKEN_DIM = 3  # keys and values have shape (layers, 2, kv heads, tokens, head size)


class Node:
    """One run of tokens below its parent. `kv` and `routed` cover exactly these tokens."""

    __slots__ = ("children", "kv", "parent", "routed", "tokens", "used_at")

    def __init__(self, tokens: list[int], kv: torch.Tensor, parent: "Node | None", routed: Chosen | None) -> None:
        self.tokens = tokens
        self.kv = kv
        self.routed = routed
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.used_at = 0


class Piece:
    """The first `length` tokens of a node, as part of a match."""

    __slots__ = ("length", "node")

    def __init__(self, node: Node, length: int) -> None:
        self.node = node
        self.length = length

    @property
    def kv(self) -> torch.Tensor:
        return self.node.kv[:, :, :, : self.length]

    @property
    def routed(self) -> Chosen | None:
        return None if self.node.routed is None else self.node.routed[: self.length]


class PrefixTree:
    def __init__(self, budget_tokens: int, grain: int = 1) -> None:
        self.tokens_held = 0
        self._grain = grain
        self._budget = budget_tokens
        self._children: dict[int, Node] = {}
        self._clock = 0

    def match(self, tokens: Sequence[int], limit: int) -> list[Piece]:
        """The longest run of pieces whose tokens are the first of `tokens`, at most `limit` of them."""
        self._clock += 1
        pieces = self._longest(tokens, limit)
        held = sum(piece.length for piece in pieces)
        return pieces if held % self._grain == 0 else self._longest(tokens, self.whole(held))

    def whole(self, count: int) -> int:
        """So many tokens in whole grains."""
        return count - count % self._grain

    def _longest(self, tokens: Sequence[int], limit: int) -> list[Piece]:
        pieces: list[Piece] = []
        children, position = self._children, 0
        while position < limit and (node := children.get(tokens[position])) is not None:
            node.used_at = self._clock
            length = common_prefix(node.tokens, tokens[position : min(limit, position + len(node.tokens))])
            pieces.append(Piece(node, length))
            position += length
            if length < len(node.tokens):
                break
            children = node.children
        return pieces

    def insert(self, tokens: Sequence[int], kv: torch.Tensor, kv_start: int = 0, routed: Chosen | None = None) -> None:
        """Add what the tree does not hold of `tokens`; `kv` covers the tokens from `kv_start` on, `routed` all of them.

        Nothing is added where the tree holds less than `kv_start` of them, or where it would not fit.
        """
        tokens = tokens[: self.whole(len(tokens))]
        pieces = self.match(tokens, len(tokens))
        held = sum(piece.length for piece in pieces)
        if held == len(tokens) or held < kv_start or not self._make_room(len(tokens) - held, pieces):
            return
        parent = self._parent_of(pieces[-1]) if pieces else None
        rest = list(tokens[held:])
        own_kv = kv[:, :, :, held - kv_start : len(tokens) - kv_start].clone()
        node = Node(rest, own_kv, parent, None if routed is None else routed[held : len(tokens)].copy())
        node.used_at = self._clock
        (parent.children if parent else self._children)[rest[0]] = node
        self.tokens_held += len(rest)

    def _parent_of(self, last: Piece) -> Node:
        """The node that ends where the piece ends: the piece's own, split if need be.

        The upper part stays where it is in memory: requests that share it are known by its address.
        """
        node, length = last.node, last.length
        if length == len(node.tokens):
            return node
        routed = node.routed
        upper = Node(
            node.tokens[:length], node.kv[:, :, :, :length], node.parent, None if routed is None else routed[:length]
        )
        upper.used_at = node.used_at
        self._siblings(node)[node.tokens[0]] = upper
        node.kv = node.kv[:, :, :, length:].clone()
        node.routed = None if routed is None else routed[length:].copy()
        node.tokens = node.tokens[length:]
        node.parent = upper
        upper.children[node.tokens[0]] = node
        return upper

    def _siblings(self, node: Node) -> dict[int, Node]:
        return node.parent.children if node.parent else self._children

    def _make_room(self, tokens: int, keep: list[Piece]) -> bool:
        """Drop the leaves that were not used for longest, until `tokens` more fit."""
        if tokens > self._budget:
            return False
        kept = {id(piece.node) for piece in keep}
        while self.tokens_held + tokens > self._budget:
            leaves = [node for node in self._nodes() if not node.children and id(node) not in kept]
            if not leaves:
                return False
            oldest = min(leaves, key=lambda node: node.used_at)
            del self._siblings(oldest)[oldest.tokens[0]]
            self.tokens_held -= len(oldest.tokens)
        return True

    def _nodes(self) -> list[Node]:
        found = list(self._children.values())
        for node in found:
            found.extend(node.children.values())
        return found


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two runs have in common at the start."""
    equal, different = 0, min(len(a), len(b))
    if a[:different] == b[:different]:
        return different
    while different - equal > 1:
        middle = (equal + different) // 2
        if a[equal:middle] == b[equal:middle]:
            equal = middle
        else:
            different = middle
    return equal
