"""How small two versions' difference is: `openforge bench delta OLD NEW --json`, of two published folders.

Each tensor's numbers, rounded to `--dtype`, are compared bit by bit. `sparse` is what a delta would carry: the gaps
between changed places (LEB128) and the new values there, packed with zstandard; `xor` is all bits of old xor new, low
and high bytes apart, packed; `whole` is the new tensors themselves, packed. Deltas are decoded again and have to give
the new tensors.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zstandard

from openforge.weights import WEIGHTS

if TYPE_CHECKING:
    import numpy as np

_LEVEL = 1
_SEVEN = 0x7F


class Sizes(msgspec.Struct, kw_only=True):
    """Sums over tensors: numbers, those that changed, bytes of each encoding, and seconds."""

    numbers: int = 0
    changed: int = 0
    raw_bytes: int = 0
    whole_bytes: int = 0
    sparse_bytes: int = 0
    xor_bytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0


def measure(old: Path, new: Path, dtype: str) -> dict[str, Any]:
    sizes = Sizes()
    for before, after in _pairs(old, new, dtype):
        _add(sizes, before, after)
    return {
        "old": old.name,
        "new": new.name,
        "dtype": dtype,
        "changed_share": round(sizes.changed / sizes.numbers, 4),
        "sparse_share": round(sizes.sparse_bytes / sizes.raw_bytes, 4),
        "xor_share": round(sizes.xor_bytes / sizes.raw_bytes, 4),
        "whole_share": round(sizes.whole_bytes / sizes.raw_bytes, 4),
        **{name: round(value, 3) for name, value in msgspec.to_builtins(sizes).items()},
    }


def _add(sizes: Sizes, before: "np.ndarray[Any, Any]", after: "np.ndarray[Any, Any]") -> None:
    packer = zstandard.ZstdCompressor(level=_LEVEL)
    began = time.perf_counter()
    places, values = encode(before, after)
    sparse = packer.compress(places), packer.compress(values)
    encoded = time.perf_counter()
    if decode(before, places, values).tobytes() != after.tobytes():
        raise RuntimeError("a delta was decoded to other bits: report it")
    sizes.decode_s += time.perf_counter() - encoded
    sizes.encode_s += encoded - began
    sizes.numbers += after.size
    sizes.changed += int((before != after).sum())
    sizes.raw_bytes += after.nbytes
    sizes.whole_bytes += len(packer.compress(_planes(after)))
    sizes.xor_bytes += len(packer.compress(_planes(before ^ after)))
    sizes.sparse_bytes += sum(map(len, sparse))


def encode(before: "np.ndarray[Any, Any]", after: "np.ndarray[Any, Any]") -> tuple[bytes, bytes]:
    """Gaps between the changed places, and the values there."""
    import numpy as np

    (places,) = np.nonzero(before != after)
    return _leb128(np.diff(places, prepend=-1).astype(np.uint64)), after[places].tobytes()


def decode(before: "np.ndarray[Any, Any]", places: bytes, values: bytes) -> "np.ndarray[Any, Any]":
    import numpy as np

    after = before.copy()
    after[np.cumsum(_from_leb128(places).astype(np.int64)) - 1] = np.frombuffer(values, before.dtype)
    return after


def _leb128(numbers: "np.ndarray[Any, Any]") -> bytes:
    import numpy as np

    septets = np.stack([(numbers >> np.uint64(7 * place)) & np.uint64(_SEVEN) for place in range(5)], 1).astype(
        np.uint8
    )
    lengths = 1 + np.stack([numbers >> np.uint64(7 * place) > 0 for place in range(1, 5)], 1).sum(1)
    columns = np.arange(5)[None, :]
    septets |= np.where(columns < lengths[:, None] - 1, 0x80, 0).astype(np.uint8)
    return bytes(septets[columns < lengths[:, None]].tobytes())


def _from_leb128(data: bytes) -> "np.ndarray[Any, Any]":
    import numpy as np

    bytes_N = np.frombuffer(data, np.uint8)
    if not len(bytes_N):
        return np.zeros(0, np.uint64)
    starts = np.flatnonzero(np.concatenate(([True], bytes_N[:-1] < 0x80)))
    place_N = np.arange(len(bytes_N)) - np.repeat(starts, np.diff(np.append(starts, len(bytes_N))))
    parts = (bytes_N & _SEVEN).astype(np.uint64) << (7 * place_N).astype(np.uint64)
    return np.add.reduceat(parts, starts)


def _planes(numbers: "np.ndarray[Any, Any]") -> bytes:
    """Bytes of equal weight side by side, which pack better."""
    import numpy as np

    return bytes(np.ascontiguousarray(numbers.view(np.uint8).reshape(-1, numbers.itemsize).T).tobytes())


def _pairs(old: Path, new: Path, dtype: str) -> "Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]":
    """The bits of each tensor in both, flat."""
    import torch
    from safetensors import safe_open

    with safe_open(old / WEIGHTS, framework="pt") as before, safe_open(new / WEIGHTS, framework="pt") as after:
        for name in after.keys():  # noqa: SIM118 - no mapping, only named so
            bits = torch.uint16 if dtype == "bfloat16" else torch.uint32
            old_bits, new_bits = (
                file.get_tensor(name).to(getattr(torch, dtype)).contiguous().view(-1).view(bits).numpy()
                for file in (before, after)
            )
            yield old_bits, new_bits


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="openforge bench delta", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="what is published")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args(arguments)
    report = msgspec.json.encode(measure(options.old, options.new, options.dtype))
    print((report if options.json else msgspec.json.format(report, indent=2)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
