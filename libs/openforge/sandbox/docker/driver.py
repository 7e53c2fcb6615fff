"""Sandboxes as containers of a Docker or Podman daemon on this host.

Promises: the same init as in driver `process` is the container's first process and talks to us over a socket that is
shown to this container alone, so commands, files, terminals and ways out behave the same on both; no container has
a network; each dies with its owner, since its init ends with that socket, and the daemon removes what has died.
"""

import asyncio
import contextlib
import os
import re
import resource
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from openforge.sandbox.contract import Box, CannotIsolate, SandboxLost, SandboxSpec
from openforge.sandbox.docker import container
from openforge.sandbox.docker.control import INSIDE, Doorbell
from openforge.sandbox.docker.engine import Engine, EngineError, find_socket
from openforge.sandbox.docker.groups import ContainerGroups, groups_of, hierarchies_here
from openforge.sandbox.process import cgroups, host
from openforge.sandbox.process.box import ProcessSandbox
from openforge.sandbox.process.control import Control
from openforge.sandbox.process.driver import check_spec, until_gone
from openforge.sandbox.process.lives import DriverHere, Life
from openforge.sandbox.process.records import Record
from openforge.sandbox.process.seccomp import filter_program
from openforge.sandbox.process.ways_out import open_ways_out, ports_of, way_to_world

_READY_S, _END_S = 60.0, 30.0
_LOOK_S = 0.5
_NEEDED = {"MemoryLimit": "memory", "PidsLimit": "pids", "CpuCfsQuota": "CPU"}


class _Life(Life):
    def __init__(self, box_id: str) -> None:
        super().__init__(box_id)
        self.container = ""
        self.bell: Doorbell | None = None
        self.groups: ContainerGroups | None = None
        self.image_env: dict[str, str] = {}


class DockerDriver(DriverHere[_Life]):
    """`socket` is the daemon's, found where None. `image` is what sandboxes that name none are made from, and `runtime`
    the daemon's name of the OCI runtime to use, its default where empty. `pull`: whether images that are not there are
    fetched. `proxy_socket` is where sandboxes with network `proxy-only` lead; `owner` labels every sandbox.

    The daemon must see this host's files under the paths that we see. `start` raises `CannotIsolate`.
    """

    images = True
    shows_folders = True

    def __init__(
        self,
        state_dir: Path,
        *,
        socket: Path | None = None,
        image: str = "",
        runtime: str = "",
        pull: bool = True,
        proxy_socket: Path | None = None,
        owner: str = "",
        allow_reduced: bool = False,
    ) -> None:
        super().__init__(state_dir.absolute(), owner)
        self.isolation: Literal["full", "reduced"] = "full"
        self._engine = Engine(socket or find_socket())
        self._image = image
        self._podman = False
        self._runtime = runtime
        self._pull = pull
        self._proxy_socket = proxy_socket
        self._allow_reduced = allow_reduced
        self._home = _identity(self._state_dir)
        self._init: list[str] = []
        self._preparing = asyncio.Lock()
        self._images: dict[str, dict[str, Any]] = {}
        self._hierarchies = hierarchies_here()

    async def start(self) -> "DockerDriver":
        """Make sure of the daemon: raises `CannotIsolate` where there is none, or it cannot limit what it runs."""
        try:
            info = await self._engine.info()
            self._podman = await self._engine.is_podman()
        except EngineError as error:
            raise CannotIsolate(
                f"no container daemon answers ({error}): start dockerd, or `podman system service`, or name its socket"
                " by OPENFORGE_SANDBOX_SOCKET"
            ) from error
        missing = [word for field, word in _NEEDED.items() if not info.get(field)]
        if missing and not self._allow_reduced:
            raise CannotIsolate(
                f"{self._engine.socket} cannot limit {', '.join(missing)}: run its daemon as root with control groups,"
                " or set run.trusted_only = true to accept reduced isolation"
            )
        if self._runtime and self._runtime not in info.get("Runtimes", {}):
            known = ", ".join(sorted(info.get("Runtimes", {})))
            raise CannotIsolate(
                f"runtime = {self._runtime!r} is not known to {self._engine.socket}: it has {known}; register it "
                "there, or name one of those"
            )
        self.isolation = "reduced" if missing else "full"
        return self

    async def create(self, spec: SandboxSpec) -> Box:
        image = spec.image or self._image
        _check(spec, image)
        await self._prepare()
        life = _Life(f"{_fit(spec.name)}-{secrets.token_hex(4)}")
        self._records.write(self._record(life, spec))
        try:
            return await self._start(spec, image, life)
        except EngineError as error:
            await asyncio.shield(self._end(life))
            raise SandboxLost(f"image {image}: {error}") from error
        except BaseException:
            await asyncio.shield(self._end(life))
            raise

    async def reconcile(self, labels: Mapping[str, str]) -> int:
        """Containers of dead owners that used our state folder, and what was written down of them."""
        try:
            containers = await self._engine.list([f"{container.LABEL}home={self._home}"])
        except EngineError as error:
            raise SandboxLost(f"the containers could not be listed, so none was ended: {error}") from error
        by_id = {found["Labels"][f"{container.LABEL}sandbox"]: found["Id"] for found in containers}
        ended = 0
        for record in list(self._records.orphans(labels)):
            await self._remove(by_id.get(record.id, ""))
            await _until_groups_gone(record.groups)
            self._records.forget(record.id)
            ended += 1
        self._forget_dead_copies()
        return ended

    async def close(self) -> None:
        await self._stop_all()
        await self._engine.close()
        await self._forget_base()

    # -- what all sandboxes share

    async def _prepare(self) -> None:
        async with self._preparing:
            if not self._init:
                self._init = await asyncio.to_thread(self._write_base)

    def _write_base(self) -> list[str]:
        self._base.mkdir(parents=True, mode=0o700)
        init = host.write_runtime(self._base / "runtime", complete=True)
        program = filter_program()
        if program is not None:
            (self._base / "runtime" / "seccomp").write_bytes(program)
            (self._base / "runtime" / "seccomp").chmod(0o644)
        return init

    async def _image_of(self, name: str) -> dict[str, Any]:
        """Its configuration, fetched where it is not there and may be."""
        if name not in self._images:
            try:
                found = await self._engine.image(name)
            except EngineError as error:
                if error.status != 404 or not self._pull:
                    raise
                await self._engine.pull(name)
                found = await self._engine.image(name)
            self._images[name] = found.get("Config") or {}
        return self._images[name]

    # -- start

    async def _start(self, spec: SandboxSpec, image: str, life: _Life) -> Box:
        config = await self._image_of(image)
        life.image_env = dict(pair.split("=", 1) for pair in config.get("Env") or [] if "=" in pair)
        life.bell = Doorbell(self._base / life.id)
        binds = {**spec.binds, **container.own_binds(str(self._base / "runtime"), str(life.bell.folder))}
        wanted = container.body(
            spec,
            image,
            self._init,
            self._arguments(spec),
            binds=binds,
            volumes=sorted(set(config.get("Volumes") or {}) - set(container.OWN_FOLDERS)),
            labels=self._labels(life, spec),
            runtime=self._runtime,
            podman=self._podman,
        )
        life.container = life.id  # a reply that is lost must not leave a container
        await self._engine.create(life.id, wanted)
        await self._engine.start(life.id)
        sock, pid = await self._init_of(life)
        life.control = Control(sock)
        fds = await _ready(life.control)
        if self._hierarchies is not None and pid:
            life.groups = groups_of(self._hierarchies, pid, life.id)
            self._records.write(self._record(life, spec))
        life.ways_out = await open_ways_out(spec, fds, self._proxy_socket)
        box = ProcessSandbox(life.id, self.isolation, life.control, life.groups, self._env(life, spec), self._bury)
        self._hold(life, box, spec.ttl_s)
        return box

    def _arguments(self, spec: SandboxSpec) -> list[str]:
        calls = f"={host.INIT_FOLDER}/seccomp" if (self._base / "runtime" / "seccomp").exists() else ""
        ports = ",".join(str(port) for port in ports_of(spec, self._proxy_socket))
        return [INSIDE + calls, ports, f"{resource.RLIMIT_CORE}=0"]

    def _labels(self, life: _Life, spec: SandboxSpec) -> dict[str, str]:
        own = {"home": self._home, "sandbox": life.id, "owner": self._owner}
        return {f"{container.LABEL}{key}": value for key, value in {**spec.labels, **own}.items()}

    def _env(self, life: _Life, spec: SandboxSpec) -> Mapping[str, str]:
        return {**life.image_env, **way_to_world(spec), **spec.env}

    def _record(self, life: _Life, spec: SandboxSpec) -> Record:
        return Record(
            id=life.id,
            name=spec.name,
            owner=self._records.me,
            labels={"owner": self._owner, **spec.labels},
            uid=0,
            groups=tuple(map(str, life.groups.own)) if life.groups else (),
        )

    async def _init_of(self, life: _Life) -> tuple[Any, int]:
        """The connection of the container's init; raises `SandboxLost` as soon as the container is known to be gone."""
        assert life.bell is not None
        answer = asyncio.ensure_future(life.bell.answer())
        try:
            async with asyncio.timeout(_READY_S):
                while not (await asyncio.wait({answer}, timeout=_LOOK_S))[0]:
                    await self._check_running(life)
                return await answer
        except TimeoutError:
            hint = f"; runtime {self._runtime} must carry UNIX sockets of the host" if self._runtime else ""
            raise SandboxLost(f"{life.id}: its first process did not report in {_READY_S:.0f} s{hint}") from None
        finally:
            answer.cancel()
            life.bell.close()

    async def _check_running(self, life: _Life) -> None:
        try:
            state = (await self._engine.inspect(life.id))["State"]
        except EngineError as error:
            raise SandboxLost(f"{life.id}: it ended before its first process could report: {error}") from error
        if state["Status"] not in ("created", "running", "initialized", "configured"):
            raise SandboxLost(
                f"{life.id}: it is {state['Status']} with exit code {state.get('ExitCode')} {state.get('Error', '')}"
            )

    # -- end

    async def _end(self, life: _Life) -> None:
        life.close_doors()
        if life.control is not None:
            life.control.close()
        if life.bell is not None:
            life.bell.close()
        await self._remove(life.container)
        await _until_groups_gone(tuple(map(str, life.groups.own)) if life.groups else ())
        self._records.forget(life.id)

    async def _remove(self, name: str) -> None:
        """Until the daemon does not know it any more; raises `SandboxLost` where it still does after a while."""
        deadline = asyncio.get_running_loop().time() + _END_S
        failure = ""
        while name and asyncio.get_running_loop().time() < deadline:
            try:
                await self._engine.remove(name)
                return
            except EngineError as error:
                if error.status == 404:
                    return
                failure = str(error)  # it may be on its way out already
            await asyncio.sleep(0.02)
        if name:
            raise SandboxLost(f"{name}: still there {_END_S:.0f} s after it was to be removed: {failure}")


async def _ready(control: Control) -> list[int]:
    """The descriptors that came with the init's first word."""
    try:
        async with asyncio.timeout(_READY_S):
            return await asyncio.shield(control.ready)
    except TimeoutError as error:
        raise SandboxLost("the sandbox's first process said nothing") from error


async def _until_groups_gone(groups: Sequence[str]) -> None:
    """Everything in them has died with the container."""
    for group in groups:
        with contextlib.suppress(OSError):
            cgroups.kill_group(Path(group))
    await until_gone([Path(group) for group in groups])


def _check(spec: SandboxSpec, image: str) -> None:
    """Raises `ValueError` naming the field."""
    if not image:
        raise ValueError(
            "image = '': containers are made from images, name one, or a default by OPENFORGE_SANDBOX_IMAGE"
        )
    check_spec(spec)


def _fit(name: str) -> str:
    """As a container may be called."""
    return re.sub(r"[^a-zA-Z0-9_.-]", "-", name)[:80].lstrip("_.-") or "box"


def _identity(state_dir: Path) -> str:
    """What tells this state folder from every other whose owner talks to the same daemon."""
    place = state_dir / "id"
    with contextlib.suppress(FileExistsError):
        fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        os.write(fd, secrets.token_hex(8).encode())
        os.close(fd)
    return place.read_text()
