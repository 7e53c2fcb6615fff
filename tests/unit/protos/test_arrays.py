"""Packed arrays come back as they went."""

import struct
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openforge.protos import common_length, covered, pack_ids, pack_logprobs, spans_of, unpack_ids, unpack_logprobs
from openforge.protos.arrays import count

ids = st.lists(st.integers(-(2**31), 2**31 - 1))
floats = st.lists(st.floats(width=32, allow_nan=False))


@given(ids)
def test_ids_come_back_as_they_went(values: list[int]) -> None:
    packed = pack_ids(values)
    assert unpack_ids(packed) == values
    assert count(packed) == len(values)


@given(floats)
def test_logprobs_come_back_bit_for_bit(values: list[float]) -> None:
    assert unpack_logprobs(pack_logprobs(values)) == values


@given(ids)
def test_ids_are_little_endian_int32(values: list[int]) -> None:
    assert pack_ids(values) == struct.pack(f"<{len(values)}i", *values)


@given(floats)
def test_logprobs_are_little_endian_float32(values: list[float]) -> None:
    assert pack_logprobs(values) == struct.pack(f"<{len(values)}f", *values)


@given(st.lists(st.booleans()))
def test_spans_cover_the_flags_and_nothing_else(flags: list[bool]) -> None:
    spans = spans_of(flags)
    positions = [position for span in spans for position in range(span.start, span.start + span.length)]
    assert positions == [position for position, flag in enumerate(flags) if flag]
    assert covered(spans) == sum(flags)


@given(*[st.lists(st.integers(0, 3), max_size=30)] * 2)
def test_the_common_beginning_is_counted(one: list[int], other: list[int]) -> None:
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    assert common_length(pack_ids(one), pack_ids(other)) == common


@given(st.binary().filter(lambda data: len(data) % 4))
def test_a_length_that_is_no_multiple_of_four_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        unpack_ids(data)


def test_an_id_that_is_no_int32_is_an_error() -> None:
    with pytest.raises(OverflowError):
        pack_ids([2**31])
