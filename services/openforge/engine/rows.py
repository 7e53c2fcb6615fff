"""Keys and values that belong to one request each, side by side so that many are read in one product.

Promises: the rows of a class are always the first of its buffer, so a class is one strided view; a row that
outgrows its class moves to one twice as long; everything in a buffer is a finite number, for masked columns
are multiplied by zero.
"""

from collections.abc import Sequence

import torch

_SHORTEST = 64
_FIRST_TOKENS = 1024  # a class begins with rows for about so many


class Row:
    """One request's place: `length` tokens are written. It may move with every claim, growth and release."""

    __slots__ = ("index", "length", "owner")

    def __init__(self, owner: "RowClass", index: int, length: int) -> None:
        self.owner = owner
        self.index = index
        self.length = length


class RowClass:
    """Rows of `capacity` tokens: a buffer of shape (layers, 2, rows, kv heads, capacity, head size)."""

    def __init__(self, capacity: int, layers: int, kv_heads: int, head_size: int, dtype: torch.dtype) -> None:
        self.capacity = capacity
        self.rows: list[Row] = []
        self._shape = (layers, 2, kv_heads, head_size)
        self._dtype = dtype
        self.buffer = self._empty(0)

    def claim(self, length: int) -> Row:
        if len(self.rows) == self.buffer.shape[2]:
            self._resize(max(_FIRST_TOKENS // self.capacity, 2 * len(self.rows), 1))
        row = Row(self, len(self.rows), length)
        self.rows.append(row)
        return row

    def release(self, row: Row) -> None:
        """The last row takes the place of the released one."""
        last = self.rows.pop()
        if last is not row:
            self.view(row)[:, :, :, : last.length] = self.view(last)[:, :, :, : last.length]
            last.index = row.index
            self.rows[row.index] = last
        if not self.rows:
            self.buffer = self._empty(0)

    def view(self, row: Row) -> torch.Tensor:
        """Shape (layers, 2, kv heads, capacity, head size)."""
        return self.buffer[:, :, row.index]

    def _empty(self, rows: int) -> torch.Tensor:
        layers, two, kv_heads, head_size = self._shape
        return torch.zeros(layers, two, rows, kv_heads, self.capacity, head_size, dtype=self._dtype)

    def _resize(self, rows: int) -> None:
        old, self.buffer = self.buffer, self._empty(rows)
        self.buffer[:, :, : old.shape[2]] = old


class Rows:
    """All classes of rows of one model."""

    def __init__(self, layers: int, kv_heads: int, head_size: int, dtype: torch.dtype) -> None:
        self._shape = (layers, kv_heads, head_size)
        self._dtype = dtype
        self._classes: dict[int, RowClass] = {}

    @property
    def classes(self) -> list[RowClass]:
        """Those that hold rows, shortest first."""
        return [self._classes[capacity] for capacity in sorted(self._classes) if self._classes[capacity].rows]

    @property
    def tokens_held(self) -> int:
        return sum(row.length for rows in self._classes.values() for row in rows.rows)

    def claim(self, pieces: Sequence[torch.Tensor]) -> Row:
        """A row that begins with these keys and values, and has room for one token more."""
        lengths = [piece.shape[3] for piece in pieces]
        row = self._class_for(sum(lengths) + 1).claim(0)
        view = row.owner.view(row)
        for piece, length in zip(pieces, lengths, strict=True):
            view[:, :, :, row.length : row.length + length] = piece
            row.length += length
        return row

    def make_room(self, row: Row) -> Row:
        """The row itself while it has room for one token more, or the longer one to which it moved."""
        if row.length < row.owner.capacity:
            return row
        longer = self._class_for(row.length + 1).claim(row.length)
        longer.owner.view(longer)[:, :, :, : row.length] = row.owner.view(row)[:, :, :, : row.length]
        row.owner.release(row)
        return longer

    def release(self, row: Row) -> None:
        row.owner.release(row)

    def kv(self, row: Row) -> torch.Tensor:
        """What is written in the row, of shape (layers, 2, kv heads, length, head size)."""
        return row.owner.view(row)[:, :, :, : row.length]

    def _class_for(self, length: int) -> RowClass:
        capacity = _SHORTEST
        while capacity < length:
            capacity *= 2
        if capacity not in self._classes:
            layers, kv_heads, head_size = self._shape
            self._classes[capacity] = RowClass(capacity, layers, kv_heads, head_size, self._dtype)
        return self._classes[capacity]
