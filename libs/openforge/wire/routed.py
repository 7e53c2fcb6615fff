"""The experts that tokens went through, as engines tell them and blobs keep them: an .npy file of unsigned integers.

Promises: a file whose extent is told here is one of just that many rows, which every reader of numpy files reads.
Only the header is looked at, so nobody needs numpy who passes a file on.
"""

import math
import re

import msgspec

_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '[|<]u([124])', 'fortran_order': False, 'shape': \((\d+), (\d+), (\d+)\), \} *\n",
    re.DOTALL,
)


class Extent(msgspec.Struct, frozen=True):
    """`width` is the bytes of one number; the numbers, tokens first, are the end of the file."""

    tokens: int
    layers: int
    experts: int
    width: int


class NoRouting(ValueError):
    """The bytes are no such file."""


def extent_of(file: bytes) -> Extent:
    """How many tokens, layers and experts per token a file tells of; raises `NoRouting`."""
    header = _HEADER.match(file)
    if header is None:
        raise NoRouting(f"{len(file)} bytes that are no .npy file of unsigned integers in three dimensions")
    width, *shape = (int(number) for number in header.groups())
    if len(file) - header.end() != width * math.prod(shape):
        raise NoRouting(f"an .npy file of shape {tuple(shape)} with {len(file) - header.end()} bytes of numbers")
    tokens, layers, experts = shape
    return Extent(tokens, layers, experts, width)
