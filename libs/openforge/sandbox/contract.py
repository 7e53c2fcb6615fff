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


class PathRefused(ValueError):
    """The path is no regular file or folder within the sandbox, or is too large to read."""


class SandboxLimits(msgspec.Struct, frozen=True, kw_only=True):
    """`disk_mb` bounds what the sandbox can write; `memory_mb` bounds RAM and that together."""

    memory_mb: int = 512
    pids: int = 128
    disk_mb: int = 64
    cpus: float = 1.0


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`network`: `none`, or `proxy` for the model proxy alone, as `http://127.0.0.1:<proxy_port>`.

    `binds` maps paths of the sandbox to the host folders that are shown there, read-only. `labels` let a
    restarted owner find what it left.
    """

    name: str
    limits: SandboxLimits = SandboxLimits()
    network: Literal["none", "proxy"] = "none"
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

    async def kill_all(self) -> None:
        """End every process in the sandbox; files stay, and new commands can run. Raises `SandboxLost`."""
        ...

    async def stop(self) -> None: ...


class SandboxDriver(Protocol):
    isolation: Literal["full", "reduced"]

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """A running sandbox with empty, writable folders `/workspace`, `/tmp` and `/tests`; raises `SandboxLost`."""
        ...

    async def reconcile(self, labels: Mapping[str, str]) -> int:
        """End everything with these labels that no living owner holds; how many there were."""
        ...

    async def close(self) -> None: ...
