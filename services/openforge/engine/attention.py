"""Who reads what in one step: rows that decode one token each, and runs of prompt tokens.

Promises: each token sees exactly its own sequence; a prefix that several requests share is read once for all of
them; the softmax is over the whole sequence, whatever pieces it lies in.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from openforge.engine.rows import RowClass

# Attention that also returns the logarithm of each softmax's denominator, by which partial results are merged.
_attention_and_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Fill:
    """Prompt tokens `start` to `end` of one sequence; `kv` (layers, 2, kv heads, tokens, head size) holds all of it."""

    def __init__(self, kv: torch.Tensor, start: int, end: int) -> None:
        self.kv = kv
        self.start = start
        self.end = end
        self._mask: torch.Tensor | None = None
        if start > 0 and end - start > 1:
            self._mask = torch.ones(end - start, end, dtype=torch.bool).tril(start)

    def attend(self, layer: int, q_THd: torch.Tensor, k_TKd: torch.Tensor, v_TKd: torch.Tensor) -> torch.Tensor:
        keys, values = self.kv[layer, 0], self.kv[layer, 1]
        keys[:, self.start : self.end] = k_TKd.transpose(0, 1)
        values[:, self.start : self.end] = v_TKd.transpose(0, 1)
        read = scaled_dot_product_attention(
            q_THd.transpose(0, 1)[None],
            keys[None, :, : self.end],
            values[None, :, : self.end],
            attn_mask=self._mask,
            is_causal=self.start == 0 and self.end > 1,
            enable_gqa=q_THd.shape[1] != k_TKd.shape[1],
        )
        return read[0].transpose(0, 1).reshape(len(q_THd), -1)


class OwnRows:
    """The part of decoding requests that lies in their own rows; one token is appended to each."""

    def __init__(self, rows: RowClass, first: int, *, whole: bool = False) -> None:
        """The requests are rows `first` and following of the step, in the order of the class. `whole` rows are read to
        their end, so that what is read of one does not depend on how long the others are."""
        count, heads = len(rows.rows), rows.buffer.shape[3]
        self.span = slice(first, first + count)
        self._rows = rows
        lengths = torch.tensor([row.length for row in rows.rows])
        self._longest = rows.capacity if whole else int(lengths.max()) + 1
        places = torch.arange(count)[:, None] * heads + torch.arange(heads)
        self._places = (places * rows.capacity + lengths[:, None]).flatten()
        after_end = torch.arange(self._longest) > lengths[:, None]
        self._mask = torch.zeros(after_end.shape, dtype=rows.buffer.dtype).masked_fill_(after_end, -torch.inf)
        self._mask = self._mask[:, None, None, :]

    def append(self, layer: int, k_NKd: torch.Tensor, v_NKd: torch.Tensor) -> None:
        size = k_NKd.shape[-1]
        for half, new in enumerate((k_NKd[self.span], v_NKd[self.span])):
            self._rows.buffer[layer, half].view(-1, size).index_copy_(0, self._places, new.reshape(-1, size))

    def read(self, layer: int, q_NKRd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is read (n, K, R, d) and its log-sum-exp (n, K, R). The R queries of a kv head read as one block."""
        keys, values = self._rows.buffer[layer, :, : len(self._rows.rows), :, : self._longest]
        read, lse = _attention_and_lse(q_NKRd[self.span], keys, values, 0.0, False, attn_mask=self._mask)
        return read, lse


class SharedPrefix:
    """The part of decoding requests that several of them share; `members` are their rows of the step."""

    def __init__(self, kv: torch.Tensor, members: Sequence[int], everyone: int) -> None:
        self.kv = kv
        self.members = None if len(members) == everyone else torch.tensor(members)

    def read(self, layer: int, q_NKRd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `OwnRows.read`, for the members: all their queries are one block for the shared keys."""
        n, heads, repeats, size = q_NKRd.shape
        q = q_NKRd.transpose(0, 1).reshape(1, heads, n * repeats, size)
        read, lse = _attention_and_lse(q, self.kv[None, layer, 0], self.kv[None, layer, 1], 0.0, False)
        return read.view(heads, n, repeats, size).transpose(0, 1), lse.view(heads, n, repeats).transpose(0, 1)


class Decode:
    """One token of each of N requests: their own rows, and the prefixes they share."""

    def __init__(self, own: Sequence[OwnRows], shared: Sequence[SharedPrefix]) -> None:
        self._own = own
        self._shared = shared

    def attend(self, layer: int, q_NHd: torch.Tensor, k_NKd: torch.Tensor, v_NKd: torch.Tensor) -> torch.Tensor:
        N, heads, size = q_NHd.shape
        kv_heads = k_NKd.shape[1]
        q = q_NHd.view(N, kv_heads, heads // kv_heads, size)
        parts = []
        for own in self._own:
            own.append(layer, k_NKd, v_NKd)
            parts.append(own.read(layer, q))
        read, lse = _joined([part[0] for part in parts]), _joined([part[1] for part in parts])
        for prefix in self._shared:
            who = prefix.members
            if who is None:
                read = _merged(read, lse, *prefix.read(layer, q))
            else:
                read[who] = _merged(read[who], lse[who], *prefix.read(layer, q[who]))
        return read.reshape(N, -1)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _merged(own: torch.Tensor, own_lse: torch.Tensor, shared: torch.Tensor, shared_lse: torch.Tensor) -> torch.Tensor:
    """Two softmaxes over disjoint columns as the one over both. A request has one shared prefix at most."""
    weight = torch.sigmoid(shared_lse - own_lse).to(own.dtype)[..., None]
    return torch.lerp(own, shared, weight)


class Step:
    """The attention of one packed row: N decoding requests first, then the fills, in order."""

    def __init__(self, decoding: int, decode: Decode | None, fills: Sequence[Fill]) -> None:
        self._decoding = decoding
        self._decode = decode
        self._fills = fills

    def __call__(self, layer: int, q_THd: torch.Tensor, k_TKd: torch.Tensor, v_TKd: torch.Tensor) -> torch.Tensor:
        read = []
        at = self._decoding
        if self._decode is not None:
            read.append(self._decode.attend(layer, q_THd[:at], k_TKd[:at], v_TKd[:at]))
        for fill in self._fills:
            span = slice(at, at := at + fill.end - fill.start)
            read.append(fill.attend(layer, q_THd[span], k_TKd[span], v_TKd[span]))
        return _joined(read)
