"""Numbers on the wire: packed little-endian arrays, 4 bytes a number, no per-item cost.

Promises: `unpack(pack(x)) == x` on any machine; a length that is no multiple of four is an error.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import cast

from openforge.protos.fact import Span

_SWAP = sys.byteorder == "big"


def _pack(code: str, values: Iterable[float] | Iterable[int]) -> bytes:
    packed = array(code, values)
    if _SWAP:
        packed.byteswap()
    return packed.tobytes()


def _unpack(code: str, data: bytes) -> "array[int] | array[float]":
    if len(data) % 4:
        raise ValueError(f"packed array of {len(data)} bytes: the length must be a multiple of 4")
    values = array(code)
    values.frombytes(data)
    if _SWAP:
        values.byteswap()
    return values


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as int32."""
    return _pack("i", ids)


def unpack_ids(data: bytes) -> list[int]:
    return cast("list[int]", _unpack("i", data).tolist())


def pack_logprobs(logprobs: Iterable[float]) -> bytes:
    """Log-probabilities (natural log) as float32."""
    return _pack("f", logprobs)


def unpack_logprobs(data: bytes) -> list[float]:
    return cast("list[float]", _unpack("f", data).tolist())


def count(data: bytes) -> int:
    """How many numbers a packed array holds."""
    return len(data) // 4


def common_length(one: bytes, other: bytes) -> int:
    """How many leading numbers two packed arrays share: bisection, since comparing slices is quick."""
    low, high = 0, min(count(one), count(other))
    while low < high:
        middle = (low + high + 1) // 2
        same = one[low * 4 : middle * 4] == other[low * 4 : middle * 4]
        low, high = (middle, high) if same else (low, middle - 1)
    return low


def spans_of(flags: Sequence[bool]) -> tuple[Span, ...]:
    """The runs of true flags, in order."""
    spans: list[Span] = []
    start = -1
    for position, flag in enumerate(flags):
        if flag and start < 0:
            start = position
        elif not flag and start >= 0:
            spans.append(Span(start, position - start))
            start = -1
    if start >= 0:
        spans.append(Span(start, len(flags) - start))
    return tuple(spans)


def covered(spans: Iterable[Span]) -> int:
    """How many positions the spans cover (they do not overlap)."""
    return sum(span.length for span in spans)
