"""Commands: forked children that become what was asked for, on the pipes or the terminal that they are given.

Promises: a command's output never passes through the process that starts it; each has a session of its own.
"""

import _signal  # type: ignore[import-not-found]
import posix
import sys

from openforge.sandbox.inside.files import complain, do_files
from openforge.sandbox.inside.kernel import PR_SET_DUMPABLE, prctl

CANNOT_START = 126
NOT_FOUND = 127
COMMANDS = RUN, RUN_PRIVATELY = b"run", b"run-privately"
_CHUNK = 1 << 16
_SET_WINDOW_SIZE = 0x5414


def start(number: bytes, fds: list[int], work: "list[bytes]", rlimits: dict[int, int]) -> int:
    """Fork the child that becomes the command, or does the file work; its pid."""
    pid = posix.fork()
    if pid:
        return pid
    code = CANNOT_START
    try:
        enter(fds)
        code = run(work, rlimits) if work[0] in COMMANDS else do_files(work)
    except OSError as error:
        complain(f"{error.strerror}")
    except EOFError:
        complain("the data ended early")
    finally:
        posix._exit(code)
    return 0


def enter(fds: list[int]) -> None:
    """Own session, own kill group, the asker's pipes; first in line when memory runs out."""
    if posix.getsid(0) != posix.getpid():
        posix.setsid()
    if len(fds) > 3:
        posix.write(fds[3], b"0")
        posix.close(fds[3])
    prctl(PR_SET_DUMPABLE, 1)
    try:
        adjust = posix.open("/proc/self/oom_score_adj", posix.O_WRONLY)
        posix.write(adjust, b"1000")
        posix.close(adjust)
    except OSError:
        pass  # only the order of victims changes
    for target in range(3):
        posix.dup2(fds[target], target)
    _signal.set_wakeup_fd(-1)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    _signal.signal(_signal.SIGPIPE, _signal.SIG_DFL)


def start_on_terminal(slave: bytes, group: list[int], work: "list[bytes]", rlimits: dict[int, int]) -> int:
    """As `start`, on the terminal `slave`, which becomes the command's own."""
    pid = posix.fork()
    if pid:
        return pid
    code = CANNOT_START
    try:
        posix.setsid()
        fd = posix.open(slave, posix.O_RDWR)  # the first terminal that a session's leader opens is its own
        posix.dup2(fd, 0)
        enter([0, 0, 0, *group])
        code = run(work, rlimits)
    except OSError as error:
        complain(f"{error.strerror}")
    finally:
        posix._exit(code)
    return 0


def set_size(terminal: int, rows: int, cols: int) -> None:
    """Before the command can ask for it."""
    import fcntl  # only sandboxes with terminals pay for it

    numbers = (rows, cols, 0, 0)
    fcntl.ioctl(terminal, _SET_WINDOW_SIZE, b"".join(number.to_bytes(2, sys.byteorder) for number in numbers))


def run(work: list[bytes], rlimits: dict[int, int]) -> int:
    """Become the command `work` = run or run-privately, cwd, argc, argv*, env*; returns only where it cannot."""
    cwd, argc = work[1], int(work[2])
    argv, pairs = work[3 : 3 + argc], work[3 + argc :]
    env = {key: value for key, _, value in (pair.partition(b"=") for pair in pairs)}
    try:
        posix.chdir(cwd)
    except OSError as error:
        complain(f"cwd {cwd.decode(errors='replace')}: {error.strerror}")
        return CANNOT_START
    if rlimits:
        import resource

        for which, limit in rlimits.items():
            resource.setrlimit(which, (limit, limit))
    return execute(argv, env, private=work[0] == RUN_PRIVATELY)


def execute(argv: list[bytes], env: dict[bytes, bytes], private: bool) -> int:
    name = argv[0]
    places = [b""] if b"/" in name else [place + b"/" for place in env.get(b"PATH", b"/bin").split(b":")]
    failure = "No such file or directory"
    for place in places:
        try:
            if private:
                become_privately(place + name, argv, env)
            posix.execve(place + name, argv, env)
        except FileNotFoundError:
            continue
        except OSError as error:
            complain(f"{name.decode(errors='replace')}: {error.strerror}")
            return CANNOT_START
    complain(f"{name.decode(errors='replace')}: {failure}")
    return NOT_FOUND


def become_privately(path: bytes, argv: list[bytes], env: dict[bytes, bytes]) -> None:
    """Execute a copy that its own user may not read: the kernel keeps the memory, the descriptors and the environment
    of such a process from every other of that user. What it starts is as open as ever.
    """
    head = head_of(path)
    if head.startswith(b"#!"):
        interpreter, *option = head[2:].partition(b"\n")[0].strip().split(None, 1)
        path, argv = interpreter, [interpreter, *option, path, *argv[1:]]
    posix.execve(unreadable_copy(path), argv, env)


def head_of(path: bytes) -> bytes:
    fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    try:
        return posix.read(fd, 256)
    finally:
        posix.close(fd)


def unreadable_copy(path: bytes) -> int:
    """A descriptor of it, in memory."""
    written = posix.memfd_create("program", posix.MFD_CLOEXEC)
    source = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    while posix.sendfile(written, source, None, _CHUNK << 8):
        pass
    posix.close(source)
    copy = posix.open(b"/proc/self/fd/%d" % written, posix.O_RDONLY | posix.O_CLOEXEC)
    posix.close(written)  # nothing that is open for writing can be executed
    posix.fchmod(copy, 0o111)
    return copy
