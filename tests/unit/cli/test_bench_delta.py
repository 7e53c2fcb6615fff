"""A delta's encoding gives the bits that it was made from."""

import numpy as np
import pytest

from openforge.cli.bench.delta import decode, encode


@pytest.mark.parametrize("changed", [0.0, 0.001, 0.3, 1.0])
def test_what_was_encoded_is_decoded_bit_for_bit(changed: float) -> None:
    rng = np.random.default_rng(0)
    before = rng.integers(0, 2**16, 300_000, dtype=np.uint16)
    after = np.where(rng.random(before.size) < changed, rng.integers(0, 2**16, before.size, dtype=np.uint16), before)
    places, values = encode(before, after)
    assert np.array_equal(decode(before, places, values), after)
    assert len(values) == 2 * (before != after).sum()


def test_gaps_of_every_length_are_kept() -> None:
    before = np.zeros(1 << 22, np.uint32)
    after = before.copy()
    after[[0, 127, 128, 300, 20_000, 2_200_000, (1 << 22) - 1]] = 7
    places, values = encode(before, after)
    assert np.array_equal(decode(before, places, values), after)
