"""Real drivers for tests; where this host cannot isolate, a test says why it skips.

The contract suite runs once for each case of `CASES`. A new driver is one more case: how to make it, the image that
its sandboxes are made from, and nothing else.
"""

import os
import secrets
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from container_daemons import IMAGE
from kube_api import NAMESPACE, KubeApi
from needed import cannot

from openforge.sandbox.contract import NETWORKS, SandboxDriver, SandboxLimits, SandboxSpec
from openforge.sandbox.docker import DockerDriver
from openforge.sandbox.kubernetes import KubernetesDriver
from openforge.sandbox.kubernetes.pod import PodSettings
from openforge.sandbox.kubernetes.toolbox import write_toolbox
from openforge.sandbox.process import CannotIsolate, ProcessDriver

SMALL = SandboxLimits(memory_mb=192, pids=64, disk_mb=16)


def full_driver(state_dir: Path, proxy_socket: Path | None = None) -> ProcessDriver:
    try:
        return ProcessDriver(state_dir, proxy_socket=proxy_socket, owner=f"test-{secrets.token_hex(3)}")
    except CannotIsolate as reason:
        cannot(str(reason))


async def process_driver(state_dir: Path, proxy_socket: Path | None, socket: Path | None) -> SandboxDriver:
    assert socket is None
    return full_driver(state_dir, proxy_socket)


async def docker_driver(state_dir: Path, proxy_socket: Path | None, socket: Path | None) -> SandboxDriver:
    owner = f"test-{secrets.token_hex(3)}"
    return await DockerDriver(state_dir, socket=socket, pull=False, proxy_socket=proxy_socket, owner=owner).start()


class _WithApi(KubernetesDriver):
    """Ends its API server with itself."""

    api: KubeApi

    async def close(self) -> None:
        await super().close()
        await self.api.stop()


async def kubernetes_driver(state_dir: Path, proxy_socket: Path | None, socket: Path | None) -> SandboxDriver:
    """On the API server of `kube_api`, or on a real one where KUBECONFIG is set (see docs/isolation.md)."""
    assert socket is None
    owner = f"test-{secrets.token_hex(3)}"
    if real := os.environ.get("KUBECONFIG"):
        settings = PodSettings(toolbox=os.environ["OPENFORGE_TEST_TOOLBOX"])
        namespace = os.environ.get("OPENFORGE_TEST_NAMESPACE", "default")
        return await KubernetesDriver(settings, owner=owner, namespace=namespace, kubeconfig=real).start()
    if os.geteuid() != 0 or shutil.which("bwrap") is None:
        cannot("the node of the API server for tests needs root and bwrap")
    write_toolbox(state_dir / "toolbox")
    api = KubeApi(state_dir / "toolbox")
    await api.start()
    driver = _WithApi(
        PodSettings(toolbox="toolbox:1"),
        owner=owner,
        namespace=NAMESPACE,
        kubeconfig=str(api.kubeconfig(state_dir / "kubeconfig")),
    )
    driver.api = api
    await driver.start()
    return driver


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """`make(state_dir, proxy_socket, socket)` skips with a reason where this host cannot run the driver.

    `daemon` is whose socket that is, one of `container_daemons`.
    """

    name: str
    make: Callable[[Path, Path | None, Path | None], Awaitable[SandboxDriver]]
    image: str = ""
    daemon: str = ""
    networks: tuple[str, ...] = NETWORKS

    def spec(self, name: str, **more: Any) -> SandboxSpec:
        return SandboxSpec(**{"name": name, "image": self.image, "limits": SMALL, **more})


KUBERNETES = Case(
    name="kubernetes",
    make=kubernetes_driver,
    image=os.environ.get("OPENFORGE_TEST_IMAGE", "box:1"),
    networks=("none", "proxy-only"),
)
CASES = (
    Case(name="process", make=process_driver),
    Case(name="docker", make=docker_driver, image=IMAGE, daemon="docker"),
    Case(name="podman", make=docker_driver, image=IMAGE, daemon="podman"),
    KUBERNETES,
)
