"""The small process that starts sandboxes, so that its owner needs neither fork nor threads.

Promises: every sandbox dies with this process, and this process when its owner's socket closes; what it
mounts lies in a mount namespace of its own and is gone with it; a started sandbox holds no descriptor but
those it was given. Single-threaded on purpose: `bwrap --die-with-parent` follows the thread that started it.

It speaks JSON datagrams: `{"id", "argv", "uid", "entries", "seccomp"}` with the
descriptors (control, stderr) starts, answered by `{"id", "pid"}` or `{"id", "error"}`; `{"kill": pid}`
kills one that it started. Runs as a plain file of the standard library.
"""

import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
from typing import Any

_CLONE_NEWNS = 0x00020000
_MS_BIND, _MS_REC, _MS_SLAVE, _MNT_DETACH = 0x1000, 0x4000, 0x80000, 2
_MOST_STAGED = 256
_libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


class Stage:
    """Host folders made reachable for users who may not walk there, within our own mount namespace."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.places: dict[str, str] = {}
        self.count = 0
        check(_libc.unshare(_CLONE_NEWNS), "unshare")
        check(_libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None), "mount")
        check(_libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, b"size=1m,mode=755"), f"mount {folder}")

    def place(self, source: str) -> str:
        """What was used last is dropped last: sandboxes that are just being made still walk there."""
        real = os.path.realpath(source, strict=True)
        place = self.places.pop(real, None)
        if place is None:
            while len(self.places) >= _MOST_STAGED:
                self.drop(next(iter(self.places)))
            place = self.bind(real)
        self.places[real] = place
        return place

    def bind(self, real: str) -> str:
        self.count += 1
        place = f"{self.folder}/{self.count}"
        if os.path.isdir(real):
            os.mkdir(place)
        else:
            os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))
        check(_libc.mount(os.fsencode(real), place.encode(), None, _MS_BIND | _MS_REC, None), f"bind {real}")
        return place

    def drop(self, real: str) -> None:
        """Sandboxes that have it keep their own mount of it."""
        check(_libc.umount2(self.places.pop(real).encode(), _MNT_DETACH), f"unbind {real}")


class Launcher:
    def __init__(self, asker: socket.socket, stage: Stage | None) -> None:
        self.asker = asker
        self.stage = stage
        self.children: set[int] = set()

    def serve(self) -> None:
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self.asker, select.POLLIN)
        poll.register(wake_read, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == wake_read:
                    os.read(wake_read, 4096)
                    self.reap()
                elif not self.hear():
                    return

    def hear(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self.asker, 1 << 20, 8)
        if not data:
            return False
        request = json.loads(data)
        if "kill" in request:
            self.kill(request["kill"])
            return True
        try:
            reply = {"id": request["id"], "pid": self.start(request, fds)}
        except OSError as error:
            reply = {"id": request["id"], "error": str(error)}
        finally:
            for fd in fds:
                os.close(fd)
        self.asker.send(json.dumps(reply).encode())
        return True

    def kill(self, pid: int) -> None:
        if pid in self.children:
            os.kill(pid, signal.SIGKILL)

    def reap(self) -> None:
        while self.children:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self.children.discard(pid)

    def start(self, request: dict[str, Any], fds: list[int]) -> int:
        argv = [self.resolve(part) for part in request["argv"]]
        pid = os.fork()
        if pid == 0:
            become(request, argv, fds)
        self.children.add(pid)
        return pid

    def resolve(self, part: "str | dict[str, str]") -> str:
        if isinstance(part, str):
            return part
        place = self.stage.place(part["host"]) if self.stage else os.path.realpath(part["host"], strict=True)
        return place + part.get("then", "")


def become(request: dict[str, Any], argv: list[str], fds: list[int]) -> None:
    """In the child: enter the groups while still root, give up root, become bubblewrap."""
    try:
        control, errors = fds
        os.dup2(errors, 2)
        for entry in request["entries"]:
            with open(entry, "w") as procs:
                procs.write("0")
        quiet = os.open("/dev/null", os.O_RDWR)
        filter_fd = os.open(request["seccomp"], os.O_RDONLY) if request["seccomp"] else quiet
        kept = [os.dup2(os.dup(fd), target) for fd, target in ((control, 13), (filter_fd, 14))]
        for source, target in zip((quiet, quiet, *kept), (0, 1, 3, 4), strict=True):
            os.dup2(source, target)
        os.closerange(5, 1024)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.umask(0o022)
        if request["uid"]:
            os.setgroups([])
            os.setresgid(request["uid"], request["uid"], request["uid"])
            os.setresuid(request["uid"], request["uid"], request["uid"])
        os.execv(argv[0], argv)
    except OSError as error:
        os.write(2, f"cannot start the sandbox: {error}\n".encode())
    finally:
        os._exit(1)


def main() -> None:
    """argv: the control descriptor; the folder to stage host folders in, empty where we may not mount."""
    asker = socket.socket(fileno=int(sys.argv[1]))
    asker.set_inheritable(False)
    stage = Stage(sys.argv[2]) if sys.argv[2] else None
    asker.send(b'{"ready": true}')
    Launcher(asker, stage).serve()


if __name__ == "__main__":
    main()
