"""Where attacks run: sandboxes of a driver, and a place without walls."""

import asyncio
import contextlib
import io
import os
import signal
import socket
import tarfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sandbox_drivers import Case

from attacks.attack import Stakes, told
from openforge.sandbox.contract import Box, ExecResult, SandboxDriver, SandboxLost
from openforge.sandbox.egress import EGRESS_PORT, Egress, Rules

WRITABLE = (".", "/tmp", "/dev/shm", "/tests", "/var/tmp")
PROGRAMS = ("/usr/bin", "/usr/lib", "/etc", "/", "/run", "/run/openforge", "/dev", "/var", "/home", "/root", "/sys")
METADATA = ("169.254.169.254:80", "[fd00:ec2::254]:80", "100.100.100.200:80", "metadata.google.internal:80")
RESOLVERS = ("8.8.8.8:53", "1.1.1.1:53", "127.0.0.53:53", "127.0.0.1:53", "169.254.169.253:53")
SOCKETS = (
    "/var/run/docker.sock",
    "/run/docker.sock",
    "/run/podman/podman.sock",
    "/run/containerd/containerd.sock",
    "/run/openforge-control/control",
    "/run/dbus/system_bus_socket",
    "/run",
    "/var",
    "/tmp",
)


class Boxed:
    """A sandbox. Whoever opens it ends it."""

    def __init__(self, box: Box, driver: SandboxDriver, case: Case, stakes: Stakes) -> None:
        self.box = box
        self.name = case.name
        self.how = "it won nothing"
        self._driver = driver
        self._case = case
        self._stakes = stakes
        self._neighbours: list[Boxed] = []
        self.targets: Mapping[str, Sequence[str]] = {
            "folders": WRITABLE,
            "programs": PROGRAMS,
            "metadata": METADATA,
            "resolvers": (*RESOLVERS, f"127.0.0.1:{stakes.datagrams}"),
            "sockets": (*SOCKETS, str(stakes.socket)),
            "world": (str(EGRESS_PORT),),
            "user": ("",),
        }

    async def run(self, argv: Sequence[str], *, timeout_s: float = 30.0) -> ExecResult:
        result = await self.box.exec(argv, timeout_s=timeout_s)
        self.how = told(result)
        return result

    async def alive(self) -> bool:
        try:
            return (await self.box.exec(["echo", "alive"], timeout_s=20)).stdout == b"alive\n"
        except SandboxLost:
            return False

    async def neighbour(self) -> "Boxed":
        made = await self._driver.create(self._case.spec("neighbour"))
        self._neighbours.append(Boxed(made, self._driver, self._case, self._stakes))
        return self._neighbours[-1]

    async def end_neighbours(self) -> None:
        for neighbour in self._neighbours:
            await neighbour.box.stop()

    async def end_work(self) -> None:
        await self.box.kill_all()
        self.how = "all processes were ended"

    async def fetch(self, name: str) -> bytes:
        return await self._noted(asyncio.wait_for(self.box.get(f"/workspace/{name}"), 10))

    async def collect(self) -> bytes:
        tar: bytes = await self._noted(self.box.get_tar(["/workspace"]))
        self.how = f"nothing of it is in an archive of {len(tar)} bytes"
        return tar

    async def unpack(self, tar: bytes) -> None:
        await self._noted(self.box.put_tar("/workspace", tar))

    async def names(self) -> list[str]:
        return [file.name for file in await self._noted(self.box.list_files("/workspace"))]

    async def _noted(self, doing: Any) -> Any:
        try:
            return await doing
        except (ValueError, TimeoutError) as refusal:
            self.how = f"refused: {refusal}"[:200]
            raise


class _Everything(Rules):
    """No rule at all."""

    def __init__(self) -> None:
        super().__init__("open", ())

    def check_address(self, address: str, host: str, port: int) -> None:
        return None


class Unguarded:
    """A tree of ordinary processes of this host, as root: its files, its network and its rights are theirs. It has
    process numbers and mounts of its own, so that nothing but itself can be harmed. Its owner is careless in every way.
    """

    name = "unguarded"
    how = ""

    def __init__(self, stakes: Stakes, work: Path) -> None:
        self._stakes = stakes
        self.work = work
        self._root = 0
        self._supervisor = 0
        self._outer: asyncio.subprocess.Process | None = None
        self._carried = -1
        self._groups: list[int] = []
        self._egress: Egress | None = None
        programs = work.parent / "programs"
        programs.mkdir(exist_ok=True)
        self.targets: Mapping[str, Sequence[str]] = {
            "folders": (".",),
            "programs": (str(programs),),
            "metadata": (f"127.0.0.1:{stakes.port}",),
            "resolvers": (f"127.0.0.1:{stakes.datagrams}",),
            "sockets": (str(stakes.socket),),
            "user": ("65534",),
        }

    async def start(self) -> None:
        """The first process waits for an ordinary one, as a careless supervisor is."""
        self._outer = await asyncio.create_subprocess_exec(
            "unshare", "--pid", "--fork", "--mount-proc", "--kill-child",
            "sh", "-c", "sleep 100001 & echo $!; wait",
            stdout=asyncio.subprocess.PIPE, env={"SECRET": self._stakes.secret, "PATH": os.environ["PATH"]},
        )  # fmt: skip
        assert self._outer.stdout is not None
        self._supervisor = int(await self._outer.stdout.readline())
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        self._root = int(children.read_text().split()[0])
        self._carried = os.open(self._stakes.file, os.O_RDONLY)
        self._egress = Egress(_Everything())
        listening = socket.create_server(("127.0.0.1", 0))
        await self._egress.start(listening)
        self.targets = {**self.targets, "world": (str(listening.getsockname()[1]),)}

    async def stop(self) -> None:
        assert self._outer is not None
        assert self._egress is not None
        self._egress.stop()
        os.close(self._carried)
        if self._outer.returncode is None:
            self._outer.kill()
        await self._outer.wait()

    async def run(self, argv: Sequence[str], *, timeout_s: float = 30.0) -> ExecResult:
        """Its time-out ends the process group of the command and no more."""
        began = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            "nsenter", "-t", str(self._root), "-p", "-m", f"--wd={self.work}", *argv,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            start_new_session=True, pass_fds=[self._carried],
        )  # fmt: skip
        self._groups.append(process.pid)
        timed_out = False
        reading = asyncio.ensure_future(process.communicate())
        done, _ = await asyncio.wait({reading}, timeout=timeout_s)
        if not done:
            timed_out = True
            self._kill(process.pid)
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
        out, err = (b"", b"") if timed_out else reading.result()
        return ExecResult(
            exit_code=124 if timed_out else process.returncode or 0,
            stdout=out,
            stderr=err,
            timed_out=timed_out,
            wall_s=time.monotonic() - began,
        )

    def _kill(self, group: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)

    async def alive(self) -> bool:
        assert self._outer is not None
        return (
            self._outer.returncode is None
            and (await self.run(["sh", "-c", f"kill -0 {self._supervisor}"])).exit_code == 0
        )

    async def neighbour(self) -> "Unguarded":
        beside = Unguarded(self._stakes, self.work.parent / "neighbour")
        beside.work.mkdir(exist_ok=True)
        beside._root, beside._carried = self._root, self._carried
        return beside

    async def end_work(self) -> None:
        for group in self._groups:
            self._kill(group)

    async def fetch(self, name: str) -> bytes:
        """As `open(path).read()` would; 64 MB are enough to see that nothing stops it."""
        reading = await asyncio.create_subprocess_exec(
            "head", "-c", str(64 << 20), str(self.work / name), stdout=asyncio.subprocess.PIPE
        )
        try:
            out, _ = await asyncio.wait_for(reading.communicate(), 5)
        except TimeoutError:
            reading.kill()
            await reading.wait()
            raise
        return out

    async def collect(self) -> bytes:
        return await asyncio.to_thread(self._followed)

    def _followed(self) -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", dereference=True) as archive:
            archive.add(self.work, "workspace")
        return out.getvalue()

    async def unpack(self, tar: bytes) -> None:
        with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
            await asyncio.to_thread(archive.extractall, self.work, filter="fully_trusted")

    async def names(self) -> list[str]:
        return os.listdir(self.work)


@contextlib.asynccontextmanager
async def without_walls(stakes: Stakes, folder: Path) -> AsyncIterator[Unguarded]:
    work = folder / "workspace"
    work.mkdir()
    folder.chmod(0o755)
    work.chmod(0o777)
    made = Unguarded(stakes, work)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()
