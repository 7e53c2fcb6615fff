"""PID 1 of a sandbox: reaps, starts commands, reads and writes files, and never ends by itself.

Promises: it runs as the sandbox's own user under every restriction that the sandbox has, so nothing that
is asked of it can reach further than the sandbox; a command's output never passes through it (the
asker hands over the pipes); it cannot be signalled or traced from within.

It starts once per sandbox, so it imports nothing but C modules: the standard library's own wrappers would
double the price of a sandbox. It is also the agent's neighbour: whoever talks to it believes nothing it
says without checking.
"""

# ruff: noqa: SIM105 (contextlib would have to be imported)

import _ctypes
import _signal  # type: ignore[import-not-found]
import _socket
import posix
import select
import sys
import time

CONTROL_FD = 3
REFUSED = 65
MISSING = 66
TOO_LARGE = 67
CANNOT_START = 126
NOT_FOUND = 127

_REGULAR, _FOLDER, _LINK, _TYPE_MASK = 0o100000, 0o040000, 0o120000, 0o170000
_FOLDER_FLAGS = posix.O_RDONLY | posix.O_DIRECTORY | posix.O_CLOEXEC
COMMANDS = RUN, RUN_PRIVATELY = b"run", b"run-privately"
_CHUNK = 1 << 16
_MOST_ENTRIES = 200_000
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_PR_CAPBSET_DROP = 24
_SIGKILL = 9
_SET_WINDOW_SIZE = 0x5414


class Refused(Exception):
    """A path is not what was asked for; the text says which and why."""


class TooLarge(Refused):
    """There is more than was asked for."""


# Frames: a list of byte strings as `total, (length, bytes)*`, numbers as 4 bytes little-endian.


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


def prctl(option: int, value: int) -> None:
    address = _ctypes.dlsym(_ctypes.dlopen(None, 2), "prctl")  # type: ignore[arg-type]
    _ctypes.call_function(address, (option, value, 0, 0, 0))


# Commands.


class Command:
    """A forked child whose end the asker waits for."""

    def __init__(self, number: bytes, pid: int) -> None:
        self.number = number
        self.pid = pid


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
    prctl(_PR_SET_DUMPABLE, 1)
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


def complain(text: str) -> None:
    try:
        posix.write(2, text.encode() + b"\n")
    except OSError:
        pass


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


# Files: done in a child, so that a huge folder or a full disk stops nobody but the asker.


def do_files(work: list[bytes]) -> int:
    prctl(_PR_SET_DUMPABLE, 0)
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


# PID 1.


class Init:
    """Serves one asker on the control socket, and is the parent of last resort."""

    def __init__(self, control: _socket.socket, wake_fd: int, rlimits: dict[int, int]) -> None:
        self.control = control
        self.wake_fd = wake_fd
        self.rlimits = rlimits
        self.running: dict[int, Command] = {}
        self.buffer = b""
        self.fds: list[int] = []

    def serve(self) -> None:
        poll = select.poll()
        poll.register(self.control.fileno(), select.POLLIN)
        poll.register(self.wake_fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self.wake_fd:
                    posix.read(self.wake_fd, 4096)
                    self.reap()
                elif not self.hear():
                    return

    def say(self, *fields: bytes) -> None:
        self.control.sendall(frame(*fields))

    def hear(self) -> bool:
        """Take what the asker sent; False where it is gone, and with it the sandbox's reason to be."""
        data, ancillary, _, _ = self.control.recvmsg(_CHUNK, 256)
        for level, kind, packed in ancillary:
            if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
                for at in range(0, len(packed) - 3, 4):
                    fd = int.from_bytes(packed[at : at + 4], sys.byteorder)
                    posix.set_inheritable(fd, False)
                    self.fds.append(fd)
        if not data:
            return False
        self.buffer += data
        while len(self.buffer) >= 4:
            end = 4 + int.from_bytes(self.buffer[:4], "little")
            if len(self.buffer) < end:
                break
            body, self.buffer = self.buffer[4:end], self.buffer[end:]
            self.handle(fields_of(body))
        return True

    def handle(self, request: list[bytes]) -> None:
        op, number = request[0], request[1]
        if op == b"start":
            self.begin(number, int(request[2]), request[3:])
        elif op == b"terminal":
            self.begin_on_terminal(number, int(request[2]), (int(request[3]), int(request[4])), request[5:])
        elif op == b"signal":
            self.signal(number, int(request[2]))
        elif op == b"kill":
            self.kill_command(number)
        elif op == b"kill-all":
            self.kill_all()
            self.say(b"done", number, b"0")

    def begin(self, number: bytes, how_many: int, work: list[bytes]) -> None:
        fds, self.fds = self.fds[:how_many], self.fds[how_many:]
        try:
            pid = start(number, fds, work, self.rlimits)
            self.running[pid] = Command(number, pid)
        except OSError as error:
            posix.write(fds[2], f"cannot start: {error.strerror}\n".encode())
            self.say(b"done", number, b"%d" % CANNOT_START)
        finally:
            for fd in fds:
                posix.close(fd)

    def begin_on_terminal(self, number: bytes, how_many: int, size: tuple[int, int], work: list[bytes]) -> None:
        """The terminal is one of this sandbox; its other end is handed out."""
        fds, self.fds = self.fds[:how_many], self.fds[how_many:]
        try:
            master, slave = posix.openpty()
            fds += [master, slave]
            set_size(master, *size)
            pid = start_on_terminal(posix.ttyname(slave).encode(), fds[:how_many], work, self.rlimits)
            self.running[pid] = Command(number, pid)
            rights = master.to_bytes(4, sys.byteorder)
            told = frame(b"terminal", number, b"%d" % pid)
            self.control.sendmsg([told], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
        except OSError:
            self.say(b"done", number, b"%d" % CANNOT_START)
        finally:
            for fd in fds:
                posix.close(fd)

    def signal(self, number: bytes, which: int) -> None:
        for command in self.running.values():
            if command.number == number:
                try:
                    posix.killpg(command.pid, which)
                except OSError:
                    pass  # it has just ended

    def reap(self) -> None:
        while True:
            try:
                pid, status = posix.waitpid(-1, posix.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            command = self.running.pop(pid, None)
            if command is not None:
                self.say(b"done", command.number, b"%d" % posix.waitstatus_to_exitcode(status))

    def kill_all(self) -> None:
        """Kill whatever runs here, until nothing does: a fork that races is caught by the next round."""
        while True:
            try:
                posix.kill(-1, _SIGKILL)
            except ProcessLookupError:
                return self.reap()
            self.reap()
            time.sleep(0.001)

    def kill_command(self, number: bytes) -> None:
        """Kill a command without a kill group: its session, its descendants, and who carries its mark."""
        roots = {command.pid for command in self.running.values() if command.number == number}
        mark = b"OPENFORGE_COMMAND=" + number
        for _ in range(20):
            victims = belonging(roots, mark)
            if not victims:
                return
            for pid in victims:
                try:
                    posix.kill(pid, _SIGKILL)
                except ProcessLookupError:
                    continue
            roots |= victims
            self.reap()
            time.sleep(0.002)


def belonging(roots: set[int], mark: bytes) -> set[int]:
    table = dict(processes())
    members = {pid for pid, (_, session) in table.items() if pid in roots or session in roots or marked(pid, mark)}
    grown = True
    while grown:
        more = {pid for pid, (parent, _) in table.items() if parent in members} - members
        members |= more
        grown = bool(more)
    return members - {1}


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


def listen(port: int) -> "_socket.socket":
    server = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    server.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1", port))
    server.listen(128)
    return server


def inherited_control() -> "_socket.socket":
    posix.set_inheritable(CONTROL_FD, False)
    return _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, CONTROL_FD)


def connected_control(path: str) -> "_socket.socket":
    control = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    control.connect(path)
    return control


class Text(_ctypes._SimpleCData):  # type: ignore[type-arg]
    _type_ = "z"


class Pointer(_ctypes._SimpleCData):  # type: ignore[type-arg]
    _type_ = "P"


def filter_calls(path: str) -> None:
    """Deny from now on what the BPF program in that file denies, to this process and all it starts.

    `struct sock_fprog` is the number of 8-byte steps and where they are.
    """
    fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    steps = posix.read(fd, _CHUNK)
    posix.close(fd)
    held = Text(steps)
    place = Pointer.from_address(_ctypes.addressof(held)).value
    program = (len(steps) // 8).to_bytes(8, sys.byteorder) + place.to_bytes(8, sys.byteorder)
    address = _ctypes.dlsym(_ctypes.dlopen(None, 2), "prctl")  # type: ignore[arg-type]
    if _ctypes.call_function(address, (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, Text(program), 0, 0)):
        raise OSError("the system call filter was refused")


def be_deaf() -> None:
    """To the one signal that the interpreter would end by: to all others the kernel keeps a first process deaf."""
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)


def give_up_root(user: int, folders: list[str]) -> None:
    """Where the sandbox's folders cannot be made its user's from outside: give them away, then everything else."""
    for folder in folders:
        posix.chown(folder, user, user)
    for capability in range(64):
        prctl(_PR_CAPBSET_DROP, capability)
    posix.setgroups([])
    posix.setresgid(user, user, user)
    posix.setresuid(user, user, user)


def main() -> None:
    """argv: the ports to open for the asker, with commas between, then `resource=limit` for each command.

    Where nobody could hand over a control socket: first the path of one to connect to and, with `=` between, that of
    the system call filter to begin with. Where it starts as root: first of all the user to become and the folders to
    give to it, with commas between.
    """
    arguments = sys.argv[1:]
    if posix.getuid() == 0 and arguments[0].startswith("user="):
        user, *folders = arguments.pop(0).removeprefix("user=").split(",")
        give_up_root(int(user), folders)
    path, _, calls = arguments.pop(0).partition("=") if arguments[0].startswith("/") else ("", "", "")
    servers = [listen(int(port)) for port in arguments[0].split(",") if port]
    rlimits = {int(which): int(limit) for which, _, limit in (item.partition("=") for item in arguments[1:])}
    prctl(_PR_SET_DUMPABLE, 0)
    control = connected_control(path) if path else inherited_control()
    if calls:
        filter_calls(calls)
    quiet = posix.open("/dev/null", posix.O_RDWR)
    wake_read, wake_write = posix.pipe()
    posix.set_blocking(wake_write, False)
    _signal.signal(_signal.SIGCHLD, lambda *_: None)
    _signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    _signal.signal(_signal.SIGPIPE, _signal.SIG_IGN)
    be_deaf()
    if servers:
        rights = b"".join(server.fileno().to_bytes(4, sys.byteorder) for server in servers)
        control.sendmsg([frame(b"ready")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
        for server in servers:
            server.close()
    else:
        control.sendall(frame(b"ready"))
    posix.dup2(quiet, 2)
    Init(control, wake_read, rlimits).serve()


if __name__ == "__main__":
    main()
