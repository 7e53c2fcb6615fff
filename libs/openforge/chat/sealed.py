"""Reasoning as an opaque string that a harness gives back: signatures, encrypted content, redacted blocks.

Promises: any replica reads what any other one sealed; what was sealed comes back as it was sampled, whatever the
harness did to the text beside it; a string that is not whole is None. It is a checksum, no secret: a harness may read
its own model's reasoning.
"""

import base64
import binascii
import hashlib
import zlib

_MARK = b"of1"
_CHECK_BYTES = 8
_MOST_BYTES = 8 << 20
"""More reasoning than any window holds; a small string that unpacks to more is not ours."""
_URL_SAFE = str.maketrans("-_", "+/")


def seal(text: str) -> str:
    """`text` packed, with its checksum, in base64."""
    packed = zlib.compress(text.encode())
    return base64.b64encode(_MARK + _check(packed) + packed).decode()


def unseal(sealed: str) -> str | None:
    """What was sealed, None where that is not what it is. Either alphabet of base64, padded or not."""
    try:
        data = base64.b64decode(sealed.translate(_URL_SAFE).rstrip("=") + "=" * (-len(sealed.rstrip("=")) % 4))
        packed = data[len(_MARK) + _CHECK_BYTES :]
        if data[: -len(packed)] != _MARK + _check(packed):
            return None
        unpacking = zlib.decompressobj()
        plain = unpacking.decompress(packed, _MOST_BYTES)
        return plain.decode() if unpacking.eof else None
    except (binascii.Error, zlib.error, ValueError):
        return None


def given_back(shown: str, sealed: str) -> str:
    """The reasoning that a harness sends back: as it was sampled, unless what it shows is something else."""
    sampled = unseal(sealed) if sealed else None
    return shown if sampled is None or shown.strip() not in ("", sampled.strip()) else sampled


def _check(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=_CHECK_BYTES).digest()
