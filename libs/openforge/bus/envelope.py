"""How a fact becomes the payload and headers of a message, and back.

Promises: `open_(seal(bytes)) == bytes`; compression is paid for only where a sample or the fact itself says that it
saves; what is packed is one zstd frame, which every zstd reader opens.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import msgspec
import zstandard

from openforge.bus.errors import Undecodable, UnknownFact
from openforge.protos import AnyFact, Fact

ENCODING = "Of-Encoding"
BLOB = "Of-Blob"
BLOB_SIZE = "Of-Blob-Size"
MSG_ID = "Nats-Msg-Id"
FENCE = "Nats-Expected-Last-Subject-Sequence"

COMPRESS_ABOVE = 1024
_SAMPLE_ABOVE = 16 * 1024
_SAMPLE_SIZE = 2048
# compressed / raw. Text shrinks to a tenth and costs little; packed ids with their log-probs shrink to .5 to .8
# and would cost more time than all the rest of telling them (1 ms for 266 kB), so large ones go as they are.
_WORTH_IT = 0.85
_WORTH_IT_LARGE = 0.55
_LEVEL = 1

_decoder = msgspec.msgpack.Decoder(AnyFact)
_decompressor = zstandard.ZstdDecompressor()
_compressor = zstandard.ZstdCompressor(level=_LEVEL)
_FAR = zstandard.ZstdCompressionParameters.from_level(_LEVEL, window_log=24, enable_ldm=True)
_far_compressor = zstandard.ZstdCompressor(compression_params=_FAR)
"""Finds again what stood up to 16 MB before."""
_block_compressor = zstandard.ZstdCompressor(level=2)


class _Tag(msgspec.Struct):
    fact: str


def seal(data: bytes | bytearray, *, repeats: bool = False, seams: Sequence[str] = ()) -> tuple[bytes | bytearray, str]:
    """The payload and its encoding: `zstd`, or empty where compression is not worth it.

    `repeats`: long stretches come more than once, which no sample shows. `seams`: the fact's, see `Fact`; with them no
    sample is asked, which would be of one nature only.
    """
    if len(data) <= COMPRESS_ABOVE:
        return data, ""
    if repeats:
        packed = _far_compressor.compress(data)
        return (packed, "zstd") if len(packed) < _WORTH_IT * len(data) else (data, "")
    if seams:
        packed = _in_blocks(data, seams)
        return (packed, "zstd") if len(packed) < _WORTH_IT * len(data) else (data, "")
    if len(data) > _SAMPLE_ABOVE and not _sample_shrinks(data):
        return data, ""
    packed = _compressor.compress(data)
    return (packed, "zstd") if len(packed) < _WORTH_IT * len(data) else (data, "")


def _in_blocks(data: bytes | bytearray, seams: Sequence[str]) -> bytes:
    """One frame with a new block at each seam: a block has one table of how frequent each byte is, and the bytes of
    text, ids and log-probs have little in common (RFC 8878, 3.1.1.3.1)."""
    frame = _block_compressor.compressobj(size=len(data))
    packed: list[bytes] = []
    for part in _parted(data, seams):
        packed += frame.compress(part), frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    return b"".join((*packed, frame.flush()))


def _parted(data: bytes | bytearray, seams: Sequence[str]) -> Iterator[memoryview]:
    """The bytes, cut where the name of a field stands. It may stand in a text too: a wrong cut costs some bytes."""
    start = 0
    for field in seams:
        at = data.find(_key(field), start)
        if at > start:
            yield memoryview(data)[start:at]
            start = at
    yield memoryview(data)[start:]


@cache
def _key(field: str) -> bytes:
    return msgspec.msgpack.encode(field)


def open_(payload: bytes, encoding: str | None) -> bytes:
    if not encoding:
        return payload
    if encoding != "zstd":
        raise Undecodable(f"{ENCODING} = {encoding!r} is unknown; this version knows zstd")
    try:
        return _decompressor.decompress(payload)
    except zstandard.ZstdError as error:
        raise Undecodable(f"the payload is not zstd: {error}") from error


def decode(subject: str, data: bytes) -> Fact:
    """The fact that `data` is; raises `Undecodable` also where it does not belong on `subject`."""
    try:
        fact = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        if (name := _tag(data)) is not None and name not in Fact.registry:
            raise UnknownFact(f"a fact named {name!r}, which this version does not know") from error
        raise Undecodable(f"not a fact: {error}") from error
    if fact.subject() != subject:
        raise Undecodable(f"the fact belongs on {fact.subject()}, not on {subject}")
    return fact


def _tag(data: bytes) -> str | None:
    try:
        return msgspec.msgpack.decode(data, type=_Tag).fact
    except msgspec.MsgspecError:
        return None


def _sample_shrinks(data: bytes | bytearray) -> bool:
    quarter = len(data) // 4
    sample = data[quarter : quarter + _SAMPLE_SIZE] + data[3 * quarter : 3 * quarter + _SAMPLE_SIZE]
    return len(_compressor.compress(sample)) < _WORTH_IT_LARGE * len(sample)


def blob_claim(headers: Mapping[str, str] | None) -> tuple[str, int] | None:
    """Digest and size of the bytes that a message only names."""
    if not headers or BLOB not in headers:
        return None
    return headers[BLOB], int(headers.get(BLOB_SIZE, "0"))
