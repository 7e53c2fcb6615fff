"""Frames: a list of byte strings as `total, (length, bytes)*`, numbers as 4 bytes little-endian.

Promises: what is read is whole, or `EOFError`.
"""

import posix

_CHUNK = 1 << 16


def frame(*fields: bytes) -> bytes:
    body = b"".join(len(field).to_bytes(4, "little") + field for field in fields)
    return len(body).to_bytes(4, "little") + body


def fields_of(body: bytes) -> list[bytes]:
    fields, at = [], 0
    while at < len(body):
        length = int.from_bytes(body[at : at + 4], "little")
        fields.append(body[at + 4 : at + 4 + length])
        at += 4 + length
    return fields


def read_exactly(fd: int, size: int) -> bytes:
    parts, left = [], size
    while left:
        part = posix.read(fd, min(left, _CHUNK))
        if not part:
            raise EOFError
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def read_frame(fd: int) -> list[bytes]:
    return fields_of(read_exactly(fd, int.from_bytes(read_exactly(fd, 4), "little")))


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[posix.write(fd, view) :]
