import io

import numpy as np
import pytest

from openforge.wire.routed import Extent, NoRouting, extent_of


def _file(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_the_extent_of_what_numpy_writes_is_told_without_it(dtype: type) -> None:
    assert extent_of(_file(np.zeros((1234, 48, 8), dtype))) == Extent(1234, 48, 8, np.dtype(dtype).itemsize)


@pytest.mark.parametrize(
    "file",
    [
        b"",
        b"PK\x03\x04",
        _file(np.zeros((2, 3), np.uint8)),
        _file(np.zeros((2, 3, 4), np.int16)),
        _file(np.zeros((2, 3, 4), np.float32)),
        _file(np.asfortranarray(np.zeros((2, 3, 4), np.uint8))),
        _file(np.zeros((2, 3, 4), np.uint8))[:-1],
        _file(np.zeros((2, 3, 4), np.uint8)) + b"\0",
    ],
)
def test_anything_else_is_refused(file: bytes) -> None:
    with pytest.raises(NoRouting):
        extent_of(file)
