"""What a sandbox is to everybody who uses one, whatever driver made it.

Promises of every driver: a command's time-out ends that command's processes and nothing else;
output is capped, never unbounded; paths never leave the sandbox; `stop` leaves nothing behind and
may be called twice.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import msgspec


class SandboxLost(Exception):
    """The sandbox could not be made or is gone: infrastructure, never the agent's doing."""


class CannotIsolate(Exception):
    """This host or this user cannot make the sandboxes that were asked for; the text says what would help."""


class PathRefused(ValueError):
    """The path is no regular file or folder within the sandbox, or is too large to read."""


class PathMissing(PathRefused):
    """There is nothing at that path."""


class TooLarge(PathRefused):
    """There is more than the cap allows."""


class SandboxLimits(msgspec.Struct, frozen=True, kw_only=True):
    """`disk_mb` bounds what the sandbox can write; `memory_mb` bounds RAM and that together."""

    memory_mb: int = 512
    pids: int = 128
    disk_mb: int = 64
    cpus: float = 1.0


Network = Literal["none", "proxy-only", "allowlist", "open"]
NETWORKS: tuple[Network, ...] = ("none", "proxy-only", "allowlist", "open")


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`network` says what can be reached, each mode more than the one before it.

    `none`: nothing. `proxy-only`: the model proxy, as `http://127.0.0.1:<proxy_port>`, where the driver has one.
    `allowlist`: also `hosts` (`example.org`, `*.example.org`, `example.org:8443`; ports 80 and 443 unless given),
    through the HTTP proxy that `HTTP_PROXY` and `HTTPS_PROXY` name. `open`: every public address through that
    proxy, on any port; addresses of the host and of private networks are refused in both.
    `image` is what the sandbox is made from; drivers without images ignore it. `binds` maps paths of the sandbox to
    the host folders that are shown there, read-only. `labels` let a restarted owner find what it left.
    """

    name: str
    image: str = ""
    limits: SandboxLimits = SandboxLimits()
    network: Network = "proxy-only"
    hosts: tuple[str, ...] = ()
    proxy_port: int = 8080
    env: Mapping[str, str] = {}
    binds: Mapping[str, str] = {}
    labels: Mapping[str, str] = {}
    ttl_s: float = 3600.0


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """`exit_code` is 124 where the time-out ended it and negative where a signal did.

    `out_of_memory`: the sandbox's own memory limit killed something meanwhile.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes
    truncated: bool = False
    timed_out: bool = False
    out_of_memory: bool = False
    wall_s: float = 0.0


class FileInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a folder. `kind` is that of what a link leads to, `link` where it leads nowhere.

    `size` in bytes, `modified` in Unix seconds.
    """

    name: str
    kind: Literal["file", "folder", "link", "other"]
    size: int
    modified: float


class Terminal(Protocol):
    """A command on a terminal of its own, both streams merged. `pid` is its number inside the sandbox.

    Output that nobody reads stops the command; nothing is buffered without bound.
    """

    pid: int

    async def read(self) -> bytes:
        """What came since the last read, as soon as there is something; empty when the command has ended."""
        ...

    async def write(self, data: bytes) -> None:
        """As if it were typed; dropped where the command has ended."""
        ...

    def resize(self, rows: int, cols: int) -> None: ...

    async def signal(self, number: int) -> None:
        """To the command's process group."""
        ...

    async def wait(self) -> int:
        """The exit code, negative where a signal ended it; raises `SandboxLost`."""
        ...

    async def close(self) -> None:
        """End the command and all that it started. May be called twice."""
        ...


class Sandbox(Protocol):
    id: str
    isolation: Literal["full", "reduced"]

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float,
        cwd: str = "/workspace",
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        output_cap: int = 1 << 20,
    ) -> ExecResult:
        """Run a shell line (str, by `/bin/sh -c`) or an argument vector; raises `SandboxLost`."""
        ...

    async def put(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write one file, parents made; raises `PathRefused`."""
        ...

    async def put_tar(self, path: str, tar: bytes) -> None:
        """Unpack a tar under the folder `path`; raises `PathRefused` on entries that leave it."""
        ...

    async def get(self, path: str, *, cap: int = 8 << 20) -> bytes:
        """Read one regular file; raises `PathRefused`."""
        ...

    async def get_tar(self, paths: Sequence[str], *, cap: int = 64 << 20) -> bytes:
        """A tar of files and folders, modes kept, devices and sockets left out, links as links.

        Names are the paths without the leading slash (`workspace/a.txt`), so `put_tar("/", tar)` puts everything
        back where it was. The same content gives the same bytes.
        """
        ...

    async def list_files(self, path: str, *, most: int = 10_000) -> list[FileInfo]:
        """The entries of one folder, by name; raises `PathRefused`, also where there are more than `most`."""
        ...

    async def kill_all(self) -> None:
        """End every process in the sandbox; files stay, and new commands can run. Raises `SandboxLost`."""
        ...

    async def stop(self) -> None: ...


class Box(Sandbox, Protocol):
    """A sandbox in the hands of its owner. `alive` until it was stopped or lost, as far as its driver knows."""

    @property
    def alive(self) -> bool: ...

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float,
        cwd: str = "/workspace",
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        output_cap: int = 1 << 20,
        private: bool = False,
    ) -> ExecResult:
        """As of every sandbox. `private`: nothing else in the sandbox can read or change the command's memory, its
        environment or its descriptors, except what it starts itself and hands them to.
        """
        ...

    async def terminal(
        self,
        command: str | Sequence[str],
        *,
        rows: int = 24,
        cols: int = 80,
        cwd: str = "/workspace",
        env: Mapping[str, str] | None = None,
    ) -> Terminal:
        """Start a command on a terminal; raises `SandboxLost`. One that cannot be started says so and ends."""
        ...


class SandboxDriver(Protocol):
    """`images`: whether sandboxes are made from `SandboxSpec.image`. `shows_folders`: whether `SandboxSpec.binds` can
    show those of this host.
    """

    isolation: Literal["full", "reduced"]
    images: bool
    shows_folders: bool

    async def create(self, spec: SandboxSpec) -> Box:
        """A running sandbox with empty, writable folders `/workspace`, `/tmp` and `/tests`; raises `SandboxLost`."""
        ...

    def adopt(self, box: Box, spec: SandboxSpec) -> None:
        """Make an unused sandbox of this driver the one that `spec` asks for: its name, labels, environment and time.

        It must have been made with the same image, limits, network and binds. Raises `SandboxLost` where it has died.
        """
        ...

    async def reconcile(self, labels: Mapping[str, str]) -> int:
        """End everything with these labels that no living owner holds; how many there were."""
        ...

    async def close(self) -> None: ...
