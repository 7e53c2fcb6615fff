"""Files: read, written, listed and packed, each order in a child, so that a huge folder or a full disk stops nobody but
the asker.

Promises: nothing but regular files is read or written, links are followed only where the order says so, and bytes are
counted, not believed.
"""

# ruff: noqa: SIM105 (contextlib would have to be imported)

import posix

from openforge.sandbox.inside.frames import frame, read_frame, write_all
from openforge.sandbox.inside.kernel import PR_SET_DUMPABLE, prctl

REFUSED = 65
MISSING = 66
TOO_LARGE = 67
_REGULAR, _FOLDER, _LINK, _TYPE_MASK = 0o100000, 0o040000, 0o120000, 0o170000
_FOLDER_FLAGS = posix.O_RDONLY | posix.O_DIRECTORY | posix.O_CLOEXEC
_CHUNK = 1 << 16
_MOST_ENTRIES = 200_000


class Refused(Exception):
    """A path is not what was asked for; the text says which and why."""


class TooLarge(Refused):
    """There is more than was asked for."""


def do_files(work: list[bytes]) -> int:
    prctl(PR_SET_DUMPABLE, 0)
    try:
        if work[0] == b"read":
            read_file(work[1], int(work[2]))
        elif work[0] == b"unpack":
            unpack(work[1], follow=work[2] == b"follow")
        elif work[0] == b"pack":
            pack(work[2:], int(work[1]))
        elif work[0] == b"list":
            list_folder(work[1], int(work[2]))
        return 0
    except Refused as refused:
        complain(str(refused))
        return TOO_LARGE if isinstance(refused, TooLarge) else REFUSED
    except OSError as error:
        complain(f"{shown(work[1])}: {error.strerror}")
        return MISSING if isinstance(error, FileNotFoundError) else REFUSED


def complain(text: str) -> None:
    try:
        posix.write(2, text.encode() + b"\n")
    except OSError:
        pass


def shown(path: bytes) -> str:
    return path.decode(errors="replace")


def open_regular(path: bytes, flags: int, folder: "int | None" = None) -> tuple[int, posix.stat_result]:
    fd = posix.open(path, flags | posix.O_RDONLY | posix.O_NONBLOCK | posix.O_CLOEXEC, dir_fd=folder)
    about = posix.fstat(fd)
    if about.st_mode & _TYPE_MASK != _REGULAR:
        posix.close(fd)
        raise Refused(f"{shown(path)}: not a regular file")
    return fd, about


def read_file(path: bytes, cap: int) -> None:
    """Bytes are counted, not believed from the size: a sparse or growing file has any size."""
    fd, _ = open_regular(path, 0)
    left = cap
    while part := posix.read(fd, _CHUNK):
        left -= len(part)
        if left < 0:
            raise TooLarge(f"{shown(path)}: larger than {cap} bytes")
        write_all(1, part)


def list_folder(path: bytes, most: int) -> None:
    """One frame for each entry: name, kind, size, time of change in nanoseconds."""
    names = []
    with posix.scandir(path) as entries:
        for entry in entries:
            names.append(entry.name)
            if len(names) > most:
                raise TooLarge(f"{shown(path)}: more than {most} entries")
    folder = posix.open(path, _FOLDER_FLAGS)
    write_all(1, b"".join(entry_of(name, folder) for name in sorted(names)))
    posix.close(folder)


def entry_of(name: bytes, folder: int) -> bytes:
    try:
        about = posix.stat(name, dir_fd=folder)
    except OSError:  # a link to nowhere, or in a circle
        try:
            about = posix.stat(name, dir_fd=folder, follow_symlinks=False)
        except OSError:  # gone meanwhile
            return b""
    kind = {_REGULAR: b"file", _FOLDER: b"folder", _LINK: b"link"}.get(about.st_mode & _TYPE_MASK, b"other")
    return frame(name, kind, b"%d" % about.st_size, b"%d" % about.st_mtime_ns)


def unpack(base: bytes, follow: bool) -> None:
    """Entries from standard input below `base`, links never followed (but the last one by `follow`)."""
    make_folders(base)
    root = posix.open(base, _FOLDER_FLAGS)
    late_modes: list[tuple[bytes, int]] = []
    while (entry := read_frame(0))[0] != b"end":
        kind, path, mode, size, target = entry[0], entry[1], int(entry[2]), int(entry[3]), entry[4]
        *parents, name = path.split(b"/")
        folder = descend(root, parents)
        try:
            if kind == b"folder":
                make_folder(name, folder)
                late_modes.append((path, mode))
            elif kind == b"link":
                make_link(name, target, folder)
            else:
                write_file(name, mode, size, folder, follow)
        except OSError as error:
            raise Refused(f"{shown(path)}: {error.strerror}") from None
        finally:
            posix.close(folder)
    for path, mode in reversed(late_modes):
        folder = descend(root, path.split(b"/"))
        posix.chmod(folder, mode)
        posix.close(folder)


def make_folders(path: bytes) -> None:
    at = b""
    for part in path.split(b"/"):
        at += part + b"/"
        try:
            posix.mkdir(at, 0o755)
        except (FileExistsError, PermissionError):
            pass
        except OSError as error:
            if error.errno != 30:  # a read-only parent that exists is no obstacle
                raise


def descend(root: int, parents: list[bytes]) -> int:
    folder = posix.dup(root)
    for part in parents:
        make_folder(part, folder)
        try:
            below = posix.open(part, _FOLDER_FLAGS | posix.O_NOFOLLOW, dir_fd=folder)
        except OSError as error:
            raise Refused(f"{shown(part)}: no folder of the sandbox's own ({error.strerror})") from None
        finally:
            posix.close(folder)
        folder = below
    return folder


def make_folder(name: bytes, folder: int) -> None:
    try:
        posix.mkdir(name, 0o755, dir_fd=folder)
    except FileExistsError:
        pass


def make_link(name: bytes, target: bytes, folder: int) -> None:
    try:
        posix.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    posix.symlink(target, name, dir_fd=folder)


def write_file(name: bytes, mode: int, size: int, folder: int, follow: bool) -> None:
    flags = posix.O_WRONLY | posix.O_CREAT | posix.O_NONBLOCK | posix.O_CLOEXEC | (0 if follow else posix.O_NOFOLLOW)
    fd = posix.open(name, flags, 0o600, dir_fd=folder)
    if posix.fstat(fd).st_mode & _TYPE_MASK != _REGULAR:
        raise Refused(f"{shown(name)}: not a regular file")
    posix.ftruncate(fd, 0)
    while size:
        part = posix.read(0, min(size, _CHUNK))
        if not part:
            raise EOFError
        write_all(fd, part)
        size -= len(part)
    posix.fchmod(fd, mode)
    posix.close(fd)


def pack(paths: list[bytes], cap: int) -> None:
    """Every entry at and below `paths` to standard output; what is no file, folder or link is left out."""
    budget = Budget(cap)
    opened: list[tuple[bytes, int]] = []
    for path in paths:
        pack_one(path, budget, opened)
    for path, mode in reversed(opened):
        posix.chmod(path, mode)
    write_all(1, frame(b"end"))


class Budget:
    def __init__(self, cap: int) -> None:
        self.cap = self.left = cap
        self.entries = 0

    def spend(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise TooLarge(f"more than {self.cap} bytes")

    def count(self) -> None:
        self.entries += 1
        if self.entries > _MOST_ENTRIES:
            raise TooLarge(f"more than {_MOST_ENTRIES} files")


def pack_one(top: bytes, budget: Budget, opened: list[tuple[bytes, int]]) -> None:
    """`opened` collects what had to be made readable for a while, with the mode it had."""
    waiting = [top]
    while waiting:
        path = waiting.pop()
        budget.count()
        try:
            about = posix.lstat(path)
            kind, mode = about.st_mode & _TYPE_MASK, about.st_mode & 0o777
            if kind == _LINK:
                write_all(1, frame(b"link", path, b"511", posix.readlink(path)))
            elif kind == _FOLDER:
                make_readable(path, mode, 0o500, opened)
                names = posix.listdir(path)
                write_all(1, frame(b"folder", path, b"%d" % mode, b""))
                waiting.extend(path.rstrip(b"/") + b"/" + name for name in sorted(names, reverse=True))
            elif kind == _REGULAR:
                make_readable(path, mode, 0o400, opened)
                pack_file(path, mode, budget)
        except (FileNotFoundError, PermissionError):
            continue
        except OSError as error:
            if error.errno != 36:  # a name too long for any path is nobody's artifact
                raise


def make_readable(path: bytes, mode: int, needed: int, opened: list[tuple[bytes, int]]) -> None:
    if mode & needed != needed:
        posix.chmod(path, mode | needed)
        opened.append((path, mode))


def pack_file(path: bytes, mode: int, budget: Budget) -> None:
    try:
        fd, _ = open_regular(path, posix.O_NOFOLLOW)
    except Refused:
        return
    write_all(1, frame(b"file", path, b"%d" % mode, b""))
    while part := posix.read(fd, _CHUNK):
        budget.spend(len(part))
        write_all(1, frame(part))
    write_all(1, frame())
    posix.close(fd)
