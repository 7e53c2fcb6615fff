"""Bytes that are too large to tell, kept by their digest.

Promises of every store: what `put` returned can be got until somebody deletes it; `get` gives exactly those bytes
or raises; putting the same bytes again costs little and changes nothing.
"""

import hashlib
from typing import Protocol

from openforge.protos import BlobRef


class BlobLost(Exception):
    """The store does not have it, or has other bytes under that digest."""


class Blobs(Protocol):
    async def put(self, data: bytes) -> BlobRef: ...

    async def get(self, ref: BlobRef) -> bytes:
        """Raises `BlobLost`."""
        ...

    async def delete(self, ref: BlobRef) -> None:
        """Fine if it is not there."""
        ...


def ref_to(data: bytes) -> BlobRef:
    return BlobRef(hashlib.sha256(data).hexdigest(), len(data))


def check(ref: BlobRef, data: bytes) -> bytes:
    """The data, if it is what the ref says."""
    if ref_to(data) != ref:
        raise BlobLost(f"blob {ref.digest}: the store gave {len(data)} other bytes than the {ref.size} that were put")
    return data
