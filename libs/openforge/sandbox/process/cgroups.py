"""Control groups: what a sandbox may use, and the one sure way to end all of it.

Promises: for each controller the hierarchy that really has it is chosen (version 1, version 2 or both at
once: a hybrid host whose version 2 tree has no controllers would limit nothing and report no error);
groups lie in a top-level folder of our own; `remove` leaves none behind.
"""

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from openforge.sandbox.contract import SandboxLimits

FOLDER = "openforge"
_CONTROLLERS = ("memory", "pids", "cpu")
_OWN_PROCESSES = 4  # bubblewrap's two, our init, and one that it is about to start
_CPU_PERIOD_US = 100_000
# All sandboxes together weigh as much as so many ordinary processes: without it they would get no more of a
# busy machine than one of them, and everything waits for what they do. Each sandbox keeps its own limit.
_WEIGHT = 20


class NoLimits(Exception):
    """This host offers no control groups that we may write; the text says which is missing."""


class Hierarchies(msgspec.Struct, frozen=True, kw_only=True):
    """Where each controller is. `v1` maps controllers to mounts; `v2` is the unified tree, if any.

    `v2_limits` are the controllers to be used on `v2`; `kill` says which of the two ends a sandbox.
    """

    v1: dict[str, str] = {}
    v2: str = ""
    v2_limits: tuple[str, ...] = ()

    @property
    def kill_root(self) -> str:
        return self.v2 or self.v1["freezer"]


def find_hierarchies(mounts: str | None = None) -> Hierarchies:
    """Read the mount table (`mounts`, or this machine's); raises `NoLimits`."""
    v1: dict[str, str] = {}
    v2 = ""
    for line in (Path("/proc/mounts").read_text() if mounts is None else mounts).splitlines():
        _, place, kind, options = line.split()[:4]
        if kind == "cgroup":
            v1.update({name: place for name in options.split(",") if name in (*_CONTROLLERS, "freezer")})
        elif kind == "cgroup2":
            v2 = place
    unified = _read(Path(v2) / "cgroup.controllers").split() if v2 else []
    v2_limits = tuple(name for name in _CONTROLLERS if name not in v1 and name in unified)
    missing = [name for name in _CONTROLLERS if name not in v1 and name not in v2_limits]
    if missing:
        raise NoLimits(f"no control group offers {', '.join(missing)}")
    if not v2 and "freezer" not in v1:
        raise NoLimits("no control group can end a sandbox: neither version 2 nor the freezer is mounted")
    return Hierarchies(v1=v1, v2=v2, v2_limits=v2_limits)


def prepare(hierarchies: Hierarchies) -> None:
    """Make our top-level folder everywhere; raises `NoLimits` where that is not allowed."""
    try:
        for root in _roots(hierarchies):
            (Path(root) / FOLDER).mkdir(exist_ok=True)
        if hierarchies.v2_limits:
            enable = " ".join(f"+{name}" for name in hierarchies.v2_limits)
            _enable(Path(hierarchies.v2), enable)
            _enable(Path(hierarchies.v2) / FOLDER, enable)
        _weigh(hierarchies)
    except OSError as error:
        raise NoLimits(f"{error.filename}: {error.strerror}") from error


def _weigh(hierarchies: Hierarchies) -> None:
    if "cpu" in hierarchies.v1:
        _write(Path(hierarchies.v1["cpu"]) / FOLDER / "cpu.shares", str(1024 * _WEIGHT))
    else:
        _write(Path(hierarchies.v2) / FOLDER / "cpu.weight", str(100 * _WEIGHT))


def _enable(folder: Path, controllers: str) -> None:
    """Hand controllers to the groups below. In a container the top group may hold processes, which forbids it."""
    control = folder / "cgroup.subtree_control"
    try:
        _write(control, controllers)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        _move_processes(folder, folder / "openforge-host")
        _write(control, controllers)


def _move_processes(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for pid in _processes(source):
        with contextlib.suppress(ProcessLookupError):
            (target / "cgroup.procs").write_text(str(pid))


class CommandGroups:
    """One kill group for each command, below `kill_folder`; `memory_counter` is the file that counts memory kills."""

    def __init__(self, kill_folder: Path, memory_counter: str) -> None:
        self.kill_folder = kill_folder
        self._memory_counter = memory_counter

    def memory_kills(self) -> int:
        """How often the sandbox's memory limit has killed something so far."""
        for line in _read(self._memory_counter).splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
        return 0

    def open_command(self, number: int) -> int:
        """A new kill group for a command: the descriptor by which the command enters it.

        The kernel judges a move by who opened the file, so the sandbox can put itself into this group and
        into no other.
        """
        folder = self.kill_folder / f"c{number}"
        folder.mkdir()
        return os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)

    def kill_command(self, number: int) -> None:
        kill_group(self.kill_folder / f"c{number}")

    def kill_commands(self) -> None:
        """All commands and what they left in the background; the sandbox's init lives on."""
        for group in _tree(self.kill_folder):
            if group != self.kill_folder:
                kill_group(group)

    def close_command(self, number: int) -> None:
        """Forget the kill group, unless the command left something running in the background."""
        try:
            (self.kill_folder / f"c{number}").rmdir()
        except OSError:
            return

    def kill(self) -> None:
        kill_group(self.kill_folder)


class Groups(CommandGroups):
    """The groups of one sandbox, and one kill group below for each of its commands."""

    def __init__(self, hierarchies: Hierarchies, name: str) -> None:
        self.hierarchies = hierarchies
        self.folders = [Path(root) / FOLDER / name for root in _roots(hierarchies)]
        self._memory = self._folder_of("memory", name)
        super().__init__(
            Path(hierarchies.kill_root) / FOLDER / name, str(self._memory / memory_counter_name(hierarchies))
        )
        self._pids = self._folder_of("pids", name)
        self._cpu = self._folder_of("cpu", name)

    def _folder_of(self, controller: str, name: str) -> Path:
        return Path(self.hierarchies.v1.get(controller, self.hierarchies.v2)) / FOLDER / name

    def make(self, limits: SandboxLimits) -> None:
        for folder in self.folders:
            folder.mkdir()
        memory = str(limits.memory_mb << 20)
        if "memory" in self.hierarchies.v1:
            _write(self._memory / "memory.limit_in_bytes", memory)
            _write_if_there(self._memory / "memory.memsw.limit_in_bytes", memory)
        else:
            _write(self._memory / "memory.max", memory)
            _write_if_there(self._memory / "memory.swap.max", "0")
        _write(self._pids / "pids.max", str(limits.pids + _OWN_PROCESSES))
        quota = max(int(limits.cpus * _CPU_PERIOD_US), 1000)
        if "cpu" in self.hierarchies.v1:
            _write(self._cpu / "cpu.cfs_period_us", str(_CPU_PERIOD_US))
            _write(self._cpu / "cpu.cfs_quota_us", str(quota))
        else:
            _write(self._cpu / "cpu.max", f"{quota} {_CPU_PERIOD_US}")

    def entries(self) -> list[str]:
        """The files a process writes `0` to in order to enter."""
        return [str(folder / "cgroup.procs") for folder in self.folders]


def memory_counter_name(hierarchies: Hierarchies) -> str:
    return "memory.oom_control" if "memory" in hierarchies.v1 else "memory.events"


def kill_group(folder: Path) -> None:
    """SIGKILL to every process in `folder` and below, whatever they fork meanwhile."""
    if (folder / "cgroup.kill").exists():
        (folder / "cgroup.kill").write_text("1")
    else:
        for group in _tree(folder):
            _freeze_and_kill(group)


def _freeze_and_kill(folder: Path, rounds: int = 50) -> None:
    """The way of version 1: nothing forks while frozen, so one list is complete."""
    state = folder / "freezer.state"
    for _ in range(rounds):
        if not _processes(folder):
            return
        _write_if_there(state, "FROZEN")
        for pid in _processes(folder):
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        _write_if_there(state, "THAWED")
        time.sleep(0.002)


def remove_group(folder: Path) -> bool:
    """Whether it is gone, with the groups of background processes below it."""
    if _is_removed(folder):
        return True
    below = [group for group in _tree(folder) if group != folder]
    return all(_is_removed(group) for group in below) and _is_removed(folder)


def _is_removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _tree(folder: Path) -> Iterator[Path]:
    """`folder` and the groups below it, the deepest first."""
    try:
        with os.scandir(folder) as entries:
            below = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return
    for group in below:
        yield from _tree(group)
    yield folder


def _processes(folder: Path) -> list[int]:
    return [int(line) for line in _read(folder / "cgroup.procs").split()]


def _roots(hierarchies: Hierarchies) -> list[str]:
    places = [hierarchies.v1[name] for name in (*_CONTROLLERS, "freezer") if name in hierarchies.v1]
    return list(dict.fromkeys([*places, *([hierarchies.v2] if hierarchies.v2 else [])]))


def _read(path: Path | str) -> str:
    """Control files are small: one read has them whole. Nothing, where there is no such file or group."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, 1 << 16).decode()
    finally:
        os.close(fd)


def _write(path: Path | str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(fd)


def _write_if_there(path: Path | str, text: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        _write(path, text)
