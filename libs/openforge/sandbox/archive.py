"""Tar archives to and from the entry stream that the sandbox's init speaks.

Promises: archives are read and written here, in memory, and no name of theirs is ever opened on this
host; only files, folders and symbolic links pass; the same content gives the same bytes.
"""

import io
import os
import tarfile
from collections.abc import Iterator, Sequence
from typing import Literal

from openforge.sandbox.contract import FileInfo, PathRefused
from openforge.sandbox.inside.frames import fields_of, frame


def entries_of_tar(tar: bytes) -> bytes:
    """The entry stream of a tar; raises `PathRefused` on what may not be unpacked."""
    try:
        with tarfile.open(fileobj=io.BytesIO(tar), mode="r:") as archive:
            parts = list(_entries(archive, budget=len(tar)))
    except tarfile.TarError as error:
        raise PathRefused(f"not a tar archive: {error}") from error
    return b"".join([*parts, frame(b"end")])


def _entries(archive: tarfile.TarFile, budget: int) -> Iterator[bytes]:
    for member in archive:
        name = _inner_name(member.name)
        if not name:
            continue
        mode = member.mode & 0o777
        if member.isdir():
            yield _entry(b"folder", name, mode, 0)
        elif member.issym():
            yield _entry(b"link", name, mode, 0, os.fsencode(member.linkname))
        elif member.isreg() and not member.issparse():
            content = archive.extractfile(member)
            data = content.read() if content else b""
            budget -= len(data)
            if budget < 0:
                raise PathRefused(f"{member.name}: its entries overlap")
            yield _entry(b"file", name, mode, len(data)) + data
        else:
            raise PathRefused(f"{member.name}: only files, folders and symbolic links can be unpacked")


def one_file(name: str, data: bytes, mode: int) -> bytes:
    return _entry(b"file", os.fsencode(name), mode & 0o777, len(data)) + data + frame(b"end")


def _entry(kind: bytes, name: bytes, mode: int, size: int, target: bytes = b"") -> bytes:
    return frame(kind, name, b"%d" % mode, b"%d" % size, target)


def _inner_name(name: str) -> bytes:
    if name.startswith("/") or ".." in name.split("/") or "\0" in name:
        raise PathRefused(f"{name!r}: leaves the folder it is unpacked to")
    return os.fsencode("/".join(part for part in name.split("/") if part not in ("", ".")))


def tar_of_entries(stream: bytes, asked: Sequence[str]) -> bytes:
    """A tar of what the init packed: names are the paths without the leading slash.

    Raises `PathRefused` where an entry is not at or below one of the paths `asked` for.
    """
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        frames = _frames(stream)
        for fields in frames:
            if fields == [b"end"]:
                return _finish(archive, out)
            info, data = _member(fields, frames, asked)
            archive.addfile(info, io.BytesIO(data))
    raise PathRefused("the archive ended early")


def _finish(archive: tarfile.TarFile, out: io.BytesIO) -> bytes:
    archive.close()
    return out.getvalue()


def _member(fields: list[bytes], frames: Iterator[list[bytes]], asked: Sequence[str]) -> tuple[tarfile.TarInfo, bytes]:
    kind, raw_path, mode, target = fields
    path = os.fsdecode(raw_path)
    if not any(path == top or path.startswith(top.rstrip("/") + "/") for top in asked) or ".." in path.split("/"):
        raise PathRefused(f"{path!r}: was not asked for")
    info = tarfile.TarInfo(path.lstrip("/"))
    info.mode = int(mode) & 0o777
    info.mtime = 0
    data = b""
    if kind == b"folder":
        info.type = tarfile.DIRTYPE
    elif kind == b"link":
        info.type, info.linkname = tarfile.SYMTYPE, os.fsdecode(target)
    else:
        parts = []
        while chunk := next(frames):
            parts.append(chunk[0])
        data = b"".join(parts)
        info.size = len(data)
    return info, data


def files_of_entries(stream: bytes) -> list[FileInfo]:
    """What the init said of a folder; raises `PathRefused` where it is not to be believed."""
    files = []
    for fields in _frames(stream):
        kind = _KINDS.get(fields[1]) if len(fields) == 4 else None
        if kind is None:
            raise PathRefused("the folder's entries cannot be read")
        modified = int(fields[3]) / 1e9
        files.append(FileInfo(name=os.fsdecode(fields[0]), kind=kind, size=int(fields[2]), modified=modified))
    return files


_KINDS: dict[bytes, Literal["file", "folder", "link", "other"]] = {
    b"file": "file",
    b"folder": "folder",
    b"link": "link",
    b"other": "other",
}


def _frames(stream: bytes) -> Iterator[list[bytes]]:
    at = 0
    while at + 4 <= len(stream):
        end = at + 4 + int.from_bytes(stream[at : at + 4], "little")
        yield fields_of(stream[at + 4 : end])
        at = end
