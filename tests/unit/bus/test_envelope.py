"""Sealed bytes: what turns shrink to, and that any zstd reader opens them."""

import random

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from openforge.bus.envelope import open_, seal
from openforge.protos import (
    BranchCause,
    EngineIdentity,
    FinishReason,
    Sampling,
    Timing,
    TurnRecorded,
    TurnStatus,
    pack_ids,
    pack_logprobs,
)

SAMPLED = 200


def turn(new_tokens: int) -> TurnRecorded:
    """Words of four letters, each one token, drawn evenly from 2,000, and log-probs that do not repeat."""
    draw = random.Random(new_tokens)
    words = ["".join(draw.choices("abdefgiklmnoprstuvz", k=4)) for _ in range(2_000)]
    prompt, answer = draw.choices(range(2_000), k=new_tokens), draw.choices(range(2_000), k=SAMPLED)
    return TurnRecorded(
        run="bench",
        episode="e-0",
        attempt=0,
        turn=0,
        parent=None,
        cause=BranchCause.START,
        prefix=0,
        suffix=pack_ids([300 + word for word in prompt]),
        sampled=pack_ids([300 + word for word in answer]),
        logprobs=pack_logprobs([-draw.expovariate(2.0) for _ in answer]),
        versions=(),
        finish=FinishReason.STOP,
        status=TurnStatus.DELIVERED,
        sampling=Sampling(temperature=1.0),
        messages=" ".join(words[word] for word in prompt).encode(),
        reply=" ".join(words[word] for word in answer).encode(),
        engine=EngineIdentity(engine="stub"),
        timing=Timing(received_at=1.7e9),
    )


@pytest.mark.parametrize(("new_tokens", "at_most"), [(200, 3_300), (6_000, 27_500)])
def test_a_turn_packs_to_less_than_half_a_first_prompt_too_and_below_what_one_block_takes(
    new_tokens: int, at_most: int
) -> None:
    data = turn(new_tokens).encode()
    packed, encoding = seal(data, seams=TurnRecorded.seams)
    assert encoding == "zstd"
    assert len(packed) < at_most
    assert len(packed) < 0.95 * len(zstandard.ZstdCompressor(level=2).compress(data)), (
        "one table for all kinds of bytes"
    )
    assert open_(bytes(packed), encoding) == data


def test_a_packed_turn_is_one_plain_frame_that_says_its_size() -> None:
    data = turn(6_000).encode()
    packed = bytes(seal(bytearray(data), seams=TurnRecorded.seams)[0])
    assert zstandard.frame_content_size(packed) == len(data)
    reader = zstandard.ZstdDecompressor().decompressobj()
    assert reader.decompress(packed) == data
    assert reader.eof
    assert reader.unused_data == b""


def test_turns_that_were_told_before_there_were_seams_open_as_ever() -> None:
    data = turn(200).encode()
    assert open_(data, "") == open_(data, None) == data
    assert open_(zstandard.ZstdCompressor(level=1).compress(data), "zstd") == data


_PIECES = st.lists(
    st.one_of(st.binary(max_size=900), st.sampled_from([b"\xa8logprobs", b"\xa8versions", bytes(2_000)])), max_size=12
)


@given(_PIECES)
def test_whatever_stands_in_a_fact_opens_as_it_was_sealed(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    packed, encoding = seal(data, seams=TurnRecorded.seams)
    assert open_(bytes(packed), encoding) == data
