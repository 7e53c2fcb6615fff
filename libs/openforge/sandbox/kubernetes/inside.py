"""What runs inside a pod: the first process, and one short-lived process of ours beside each command.

Promises: the first process never ends by itself, reaps, and leads the pod's loopback ports to the addresses it was
given; the others take one order each on their standard input and say on both streams, after all output, how it ended.
Runs in a copy of an interpreter that has hardly any library, like all of `openforge.sandbox.inside`.

The order is one frame: nonce, number, how many bytes of input follow, then the work. The end is the nonce on each
stream and, on the second, `CODE MEMORY_KILLS` after it. Nothing but us knows the nonce before it was said.
"""

import _socket
import _thread
import posix
import select
import sys
import time

from openforge.sandbox.inside.commands import set_size, start, start_on_terminal
from openforge.sandbox.inside.frames import fields_of, read_exactly, read_frame, write_all
from openforge.sandbox.inside.init import listen
from openforge.sandbox.inside.kernel import PR_SET_DUMPABLE, prctl
from openforge.sandbox.inside.processes import MARK, be_deaf, kill_marked, slurp, wake_on_child

_SIGKILL = 9
_CHUNK = 1 << 16
_COUNTERS = (b"/sys/fs/cgroup/memory.events", b"/sys/fs/cgroup/memory/memory.oom_control")


# The first process.


def hold(ways: list[str]) -> None:
    """`ways` are `PORT=HOST:PORT`."""
    prctl(PR_SET_DUMPABLE, 0)
    wake = wake_on_child()
    be_deaf()
    for way in ways:
        port, _, target = way.partition("=")
        host, _, there = target.rpartition(":")
        _thread.start_new_thread(lead, (listen(int(port)), host, int(there)))
    while True:
        posix.read(wake, 4096)
        reap()


def reap() -> None:
    try:
        while posix.waitpid(-1, posix.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def lead(server: "_socket.socket", host: str, port: int) -> None:
    while True:
        fd, _ = server._accept()  # type: ignore[attr-defined]
        _thread.start_new_thread(connect, (_socket.socket(fileno=fd), host, port))


def connect(here: "_socket.socket", host: str, port: int) -> None:
    try:
        family, kind, proto, _, address = _socket.getaddrinfo(host.encode(), port, 0, _socket.SOCK_STREAM)[0]
        there = _socket.socket(family, kind, proto)
        there.connect(address)
    except OSError:
        here.close()
        return
    _thread.start_new_thread(pump, (here, there))
    pump(there, here)
    here.close()


def pump(source: "_socket.socket", target: "_socket.socket") -> None:
    try:
        while data := source.recv(_CHUNK):
            target.sendall(data)
        target.shutdown(_socket.SHUT_WR)
    except OSError:
        pass


# Beside a command.


def once() -> int:
    prctl(PR_SET_DUMPABLE, 0)
    nonce, number, size, *work = read_frame(0)
    kills, said = memory_kills(), b""
    if work[0] == b"kill":
        kill_marked(MARK + number, set(), lambda: None)
        code = 0
    elif work[0] == b"kill-all":
        kill_all()
        code = 0
    elif work[0] == b"terminal":
        code, said = serve_terminal(work[1:])
    else:
        code = serve_command(int(size), work)
    if not said:
        write_all(1, nonce)
    write_all(2, nonce + b"%d %d %s\n" % (code, memory_kills() - kills, said))
    return 0


def serve_command(size: int, work: list[bytes]) -> int:
    """Its exit code, negative where a signal ended it; its output goes where ours goes."""
    wake = wake_on_child()
    stdin_read, stdin_write = posix.pipe()
    pid = start(b"", [stdin_read, 1, 2], [*work], {})
    posix.close(stdin_read)
    posix.set_blocking(stdin_write, False)
    feed(pid, wake, stdin_write, size)
    return until_ended(pid, wake)


def feed(pid: int, wake: int, stdin: int, left: int) -> None:
    """Pass on `left` bytes as the command takes them, then close; stop where it ends or does not want them."""
    held = b""
    try:
        while left or held:
            if not held:
                held = posix.read(0, min(left, _CHUNK))
                if not held:
                    return
                left -= len(held)
            poll = select.poll()
            poll.register(stdin, select.POLLOUT)
            poll.register(wake, select.POLLIN)
            ready = dict(poll.poll())
            if wake in ready and has_ended(pid):
                return
            if stdin in ready:
                held = held[posix.write(stdin, held) :]
    except BrokenPipeError:
        pass
    finally:
        posix.close(stdin)


def has_ended(pid: int) -> bool:
    """Without taking its exit code."""
    return posix.waitid(posix.P_PID, pid, posix.WEXITED | posix.WNOHANG | posix.WNOWAIT) is not None


def until_ended(pid: int, wake: int) -> int:
    while True:
        ended, status = posix.waitpid(pid, posix.WNOHANG)
        if ended:
            return posix.waitstatus_to_exitcode(status)
        posix.read(wake, 4096)


def serve_terminal(fields: list[bytes]) -> tuple[int, bytes]:
    """How it ended, and how many bytes it said, in digits: its output has no end mark, for whoever looks for one holds
    back what may begin it, and at a terminal both sides may wait for just that.

    Says its process number first. `fields` are rows, cols and the work. Frames on standard input are typed text, sizes
    and signals.
    """
    wake = wake_on_child()
    master, slave = posix.openpty()
    set_size(master, int(fields[0]), int(fields[1]))
    pid = start_on_terminal(posix.ttyname(slave).encode(), [], fields[2:], {})
    posix.close(slave)
    write_all(2, b"%d\n" % pid)
    said = talk(pid, master, wake)
    return until_ended(pid, wake), b"%d" % said


def talk(pid: int, master: int, wake: int) -> int:
    """Until nobody has the terminal open, or its command has ended and it is silent; how many bytes it said."""
    poll = select.poll()
    for fd in (0, master, wake):
        poll.register(fd, select.POLLIN)
    ended, said = False, 0
    while True:
        ready = dict(poll.poll(200 if ended else None))
        if ended and not ready:
            return said
        if wake in ready:
            posix.read(wake, 4096)
            ended = ended or has_ended(pid)
        if 0 in ready:
            try:
                obey(pid, master, fields_of(read_exactly(0, int.from_bytes(read_exactly(0, 4), "little"))))
            except EOFError:
                poll.unregister(0)
        if master in ready:
            try:
                data = posix.read(master, _CHUNK)
                write_all(1, data)
            except OSError:  # nobody has the other end open
                return said
            said += len(data)


def obey(pid: int, master: int, order: list[bytes]) -> None:
    try:
        if order[0] == b"data":
            write_all(master, order[1])
        elif order[0] == b"size":
            set_size(master, int(order[1]), int(order[2]))
        elif order[0] == b"signal":
            posix.killpg(pid, int(order[1]))
    except OSError:
        pass  # it has just ended


def kill_all() -> None:
    """Everything but the first process and ourselves, until there is nothing."""
    try:
        for _ in range(5000):
            posix.kill(-1, _SIGKILL)
            time.sleep(0.001)
    except ProcessLookupError:
        pass


def memory_kills() -> int:
    for place in _COUNTERS:
        try:
            told = slurp(place)
        except OSError:
            continue
        for line in told.splitlines():
            key, _, value = line.partition(b" ")
            if key == b"oom_kill":
                return int(value)
    return 0


def main() -> None:
    if sys.argv[1] == "hold":
        hold(sys.argv[2:])
    posix._exit(once())


if __name__ == "__main__":
    main()
