"""Files as tars, and the tar that came out of an agent's box made harmless.

Promises: what `cleaned` returns holds only regular files, folders and symbolic links below the work
folder, none of them reached through a link, none with a special mode bit; its links lead to the work itself or to
programs, so never to the tests, whatever lies in their way.
"""

import io
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from openforge.env.contract import TaskFile

WORK = "workspace"
_PROGRAMS = ("usr", "bin", "sbin", "lib", "lib32", "lib64")
"""The same in an agent's box and in the verifier's, so a link there tells nothing; virtual environments have some."""
MOST_ENTRIES = 20_000


class UnusableWork(ValueError):
    """The tar of an agent's work cannot be read or holds too much."""


def pack(files: Mapping[str, TaskFile]) -> bytes:
    """A tar of `files`, the same bytes for the same files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(files):
            entry = tarfile.TarInfo(name)
            entry.size = len(files[name].content)
            entry.mode = files[name].mode
            tar.addfile(entry, io.BytesIO(files[name].content))
    return buffer.getvalue()


def write_files(folder: Path, files: Mapping[str, TaskFile]) -> None:
    """The files below `folder`, readable by everybody."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    for name, file in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.content)
        target.chmod(file.mode)


def cleaned(work: bytes, most_entries: int = MOST_ENTRIES) -> bytes:
    """The entries of `work`, a tar relative to `/`, that belong below /workspace, now relative to that.

    No bytes at all are no work. Raises `UnusableWork`.
    """
    if not work:
        return pack({})
    buffer = io.BytesIO()
    try:
        with (
            tarfile.open(fileobj=io.BytesIO(work), mode="r:") as source,
            tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as target,
        ):
            for entry, content in _wanted(source, most_entries):
                target.addfile(entry, content)
    except (tarfile.TarError, ValueError, EOFError, OverflowError) as error:
        raise UnusableWork(f"the work is no readable tar: {error}") from error
    return buffer.getvalue()


def _wanted(source: tarfile.TarFile, most_entries: int) -> Iterator[tuple[tarfile.TarInfo, io.BufferedIOBase | None]]:
    folders = {PurePosixPath()}
    taken: set[PurePosixPath] = set()
    for read, entry in enumerate(source):
        if read >= most_entries:
            raise UnusableWork(f"the work holds more than {most_entries} files")
        path = _below_work(entry.name)
        if path is None or path in taken or path in folders or not _has_real_parents(path, folders, taken):
            continue
        content: io.BufferedIOBase | None = None
        if entry.isreg():
            content = source.extractfile(entry)  # type: ignore[assignment]
        elif not entry.isdir() and not entry.issym():
            continue
        (folders if entry.isdir() else taken).add(path)
        if not entry.issym() or _leads_to_work_or_programs(path, entry.linkname):
            yield _plain(entry, path), content


def _below_work(name: str) -> PurePosixPath | None:
    parts = PurePosixPath(name).parts
    if not parts or parts[0] != WORK or ".." in parts:
        return None
    return PurePosixPath(*parts[1:])


def _has_real_parents(path: PurePosixPath, folders: set[PurePosixPath], taken: set[PurePosixPath]) -> bool:
    """False where one of the parents is a file or a link. Unnamed parents become folders."""
    if any(parent in taken for parent in path.parents):
        return False
    folders.update(path.parents)
    return True


def _leads_to_work_or_programs(path: PurePosixPath, target: str) -> bool:
    """`..` stands only at the beginning and climbs real folders of the work: behind a link it would climb others."""
    parts = PurePosixPath(target).parts
    if target.startswith("/"):
        return parts[1:2] in ((WORK,), *((folder,) for folder in _PROGRAMS)) and ".." not in parts
    climbs = next((n for n, part in enumerate(parts) if part != ".."), len(parts))
    return climbs < len(path.parts) and ".." not in parts[climbs:]


def _plain(entry: tarfile.TarInfo, path: PurePosixPath) -> tarfile.TarInfo:
    plain = tarfile.TarInfo(str(path))
    plain.type = tarfile.REGTYPE if entry.isreg() else entry.type
    plain.mode = entry.mode & 0o777
    plain.size = entry.size if entry.isreg() else 0
    plain.linkname = entry.linkname if entry.issym() else ""
    return plain
