"""PID 1 of a sandbox: reaps, starts commands, and never ends by itself.

Promises: a command's output never passes through it (the asker hands over the pipes); it cannot be signalled or traced
from within; it ends with the asker's end of its socket, and the sandbox with it.
"""

# ruff: noqa: SIM105 (contextlib would have to be imported)

import _socket
import posix
import select
import sys
import time

from openforge.sandbox.inside.commands import CANNOT_START, set_size, start, start_on_terminal
from openforge.sandbox.inside.frames import fields_of, frame
from openforge.sandbox.inside.kernel import PR_CAPBSET_DROP, PR_SET_DUMPABLE, filter_calls, prctl
from openforge.sandbox.inside.processes import MARK, be_deaf, kill_marked, wake_on_child

CONTROL_FD = 3
_CHUNK = 1 << 16
_SIGKILL = 9


class Init:
    """Serves one asker on the control socket, and is the parent of last resort.

    `running` has the number of each command, by the process whose end the asker waits for.
    """

    def __init__(self, control: _socket.socket, wake_fd: int, rlimits: dict[int, int]) -> None:
        self.control = control
        self.wake_fd = wake_fd
        self.rlimits = rlimits
        self.running: dict[int, bytes] = {}
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
            self.running[pid] = number
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
            self.running[pid] = number
            rights = master.to_bytes(4, sys.byteorder)
            told = frame(b"terminal", number, b"%d" % pid)
            self.control.sendmsg([told], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
        except OSError:
            self.say(b"done", number, b"%d" % CANNOT_START)
        finally:
            for fd in fds:
                posix.close(fd)

    def signal(self, number: bytes, which: int) -> None:
        for pid, its_number in self.running.items():
            if its_number == number:
                try:
                    posix.killpg(pid, which)
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
            number = self.running.pop(pid, None)
            if number is not None:
                self.say(b"done", number, b"%d" % posix.waitstatus_to_exitcode(status))

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
        """Where it has no kill group."""
        roots = {pid for pid, its_number in self.running.items() if its_number == number}
        kill_marked(MARK + number, roots, self.reap)


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


def give_up_root(user: int, folders: list[str]) -> None:
    """Where the sandbox's folders cannot be made its user's from outside: give them away, then everything else."""
    for folder in folders:
        posix.chown(folder, user, user)
    for capability in range(64):
        prctl(PR_CAPBSET_DROP, capability)
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
    prctl(PR_SET_DUMPABLE, 0)
    control = connected_control(path) if path else inherited_control()
    if calls:
        filter_calls(calls)
    quiet = posix.open("/dev/null", posix.O_RDWR)
    wake = wake_on_child()
    be_deaf()
    if servers:
        rights = b"".join(server.fileno().to_bytes(4, sys.byteorder) for server in servers)
        control.sendmsg([frame(b"ready")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
        for server in servers:
            server.close()
    else:
        control.sendall(frame(b"ready"))
    posix.dup2(quiet, 2)
    Init(control, wake, rlimits).serve()


if __name__ == "__main__":
    main()
