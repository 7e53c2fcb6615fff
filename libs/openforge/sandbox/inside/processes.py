"""Processes of a sandbox: which belong to a command, how they are ended, how their parent hears of it.

Promises: neither the first process nor the one that asks is ever among those that are ended.
"""

# ruff: noqa: SIM105 (contextlib would have to be imported)

import _signal  # type: ignore[import-not-found]
import posix
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

MARK = b"OPENFORGE_COMMAND="  # and its number, in the environment of a command
_SIGKILL = 9
_ROUNDS = 20


def wake_on_child() -> int:
    """A descriptor that can be read whenever a child has ended."""
    wake_read, wake_write = posix.pipe()
    posix.set_blocking(wake_write, False)
    _signal.signal(_signal.SIGCHLD, lambda *_: None)
    _signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    _signal.signal(_signal.SIGPIPE, _signal.SIG_IGN)
    return wake_read


def be_deaf() -> None:
    """To the one signal that the interpreter would end by: to all others the kernel keeps a first process deaf."""
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)


def kill_marked(mark: bytes, roots: "set[int]", reap: "Callable[[], None]") -> None:
    """Kill a command without a kill group: its session, its descendants, and who carries its mark. `roots` are the
    processes that it is known to be; `reap` is done between two rounds.
    """
    for _ in range(_ROUNDS):
        victims = belonging(roots, mark)
        if not victims:
            return
        for pid in victims:
            try:
                posix.kill(pid, _SIGKILL)
            except OSError:
                pass  # it has just ended
        roots = roots | victims
        reap()
        time.sleep(0.002)


def belonging(roots: set[int], mark: bytes) -> set[int]:
    table = dict(processes())
    members = {pid for pid, (_, session) in table.items() if pid in roots or session in roots or marked(pid, mark)}
    grown = True
    while grown:
        more = {pid for pid, (parent, _) in table.items() if parent in members} - members
        members |= more
        grown = bool(more)
    return members - {1, posix.getpid()}


def processes() -> "list[tuple[int, tuple[int, int]]]":
    """Living processes: pid -> (parent, session)."""
    found = []
    for name in posix.listdir("/proc"):
        if name.isdigit():
            try:
                rest = slurp(b"/proc/" + name.encode() + b"/stat").rpartition(b")")[2].split()
            except OSError:
                continue
            if rest and rest[0] != b"Z":
                found.append((int(name), (int(rest[1]), int(rest[3]))))
    return found


def marked(pid: int, mark: bytes) -> bool:
    try:
        return mark in slurp(b"/proc/%d/environ" % pid).split(b"\0")
    except OSError:
        return False


def slurp(path: bytes) -> bytes:
    fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    try:
        return posix.read(fd, 1 << 17)
    finally:
        posix.close(fd)
