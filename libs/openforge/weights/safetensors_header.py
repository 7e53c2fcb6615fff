"""The header of a safetensors file, read without any tensor library: eight bytes of length, then JSON."""

import json
import struct
from pathlib import Path

from openforge.weights.manifest import BadWeights, TensorEntry

_LONGEST_HEADER_BYTES = 100_000_000


def tensors_of(path: Path) -> dict[str, TensorEntry]:
    """Names, shapes and dtypes of the tensors in the file; raises `BadWeights` if it has none."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _LONGEST_HEADER_BYTES:
                raise BadWeights(f"{path}: a header of {length} bytes, not a safetensors file.")
            header = json.loads(file.read(length))
    except (OSError, struct.error, ValueError) as error:
        raise BadWeights(f"{path}: not a readable safetensors file ({error}).") from error
    return {
        name: TensorEntry(shape=tuple(entry["shape"]), dtype=entry["dtype"])
        for name, entry in header.items()
        if name != "__metadata__"
    }
