"""Which driver makes the sandboxes of a service: chosen by its settings.

Promises: a driver whose daemon does not answer is refused at the start, with what would help, and not at the first
sandbox.
"""

from pathlib import Path
from typing import Literal

import msgspec

from openforge.sandbox.contract import SandboxDriver


class DriverSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`sandbox_driver` `process` needs no daemon and shows sandboxes the programs of this host; `docker` makes them
    from images, by Docker or Podman.

    For `docker`: `sandbox_socket` is the daemon's, found where empty; `sandbox_image` is what sandboxes that name no
    image are made from; `sandbox_runtime` is an OCI runtime that the daemon knows, such as `runsc`'s name there.
    """

    sandbox_driver: Literal["process", "docker"] = "process"
    sandbox_socket: str = ""
    sandbox_image: str = ""
    sandbox_runtime: str = ""


async def open_driver(
    settings: DriverSettings,
    state_dir: Path,
    *,
    owner: str,
    proxy_socket: Path | None = None,
    allow_reduced: bool = False,
) -> SandboxDriver:
    """Raises `CannotIsolate`."""
    if settings.sandbox_driver == "docker":
        from openforge.sandbox.docker import DockerDriver

        docker = DockerDriver(
            state_dir,
            socket=Path(settings.sandbox_socket) if settings.sandbox_socket else None,
            image=settings.sandbox_image,
            runtime=settings.sandbox_runtime,
            proxy_socket=proxy_socket,
            owner=owner,
            allow_reduced=allow_reduced,
        )
        return await docker.start()
    from openforge.sandbox.process import ProcessDriver

    return ProcessDriver(state_dir, proxy_socket=proxy_socket, owner=owner, allow_reduced=allow_reduced)
