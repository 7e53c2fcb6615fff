"""Which driver makes the sandboxes of a service: chosen by its settings.

Promises: a driver whose daemon does not answer is refused at the start, with what would help, and not at the first
sandbox.
"""

import re
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from openforge.sandbox.contract import CannotIsolate, SandboxDriver

_ADDRESS = re.compile(r"(\d{1,3}(\.\d{1,3}){3}|\[?[0-9a-fA-F:]+\]?):\d{1,5}")


class DriverSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`sandbox_driver` `process` needs no daemon and shows sandboxes the programs of this host; `docker` makes them
    from images, by Docker or Podman.

    For `docker`: `sandbox_socket` is the daemon's, found where empty; `sandbox_image` is what sandboxes that name no
    image are made from; `sandbox_runtime` is an OCI runtime that the daemon knows.

    For `kubernetes`: a pod for each sandbox in `sandbox_namespace`; `sandbox_kubeconfig` is the way to the cluster,
    the pod's own account where empty; `sandbox_toolbox` is the image that brings our init; `sandbox_proxy` is the model
    proxy's IP:PORT as pods reach it and `sandbox_proxy_labels` (KEY=VALUE) those of the pods behind it;
    `sandbox_runtime` is a runtime class, `sandbox_pull` the image pull policy, `sandbox_nodes` a node selector;
    `sandbox_tools` are folders that harnesses want to see: FOLDER=IMAGE shows an image there, FOLDER says that the
    sandbox's own image holds it.
    """

    sandbox_driver: Literal["process", "docker", "kubernetes"] = "process"
    sandbox_socket: str = ""
    sandbox_image: str = ""
    sandbox_runtime: str = ""
    sandbox_namespace: str = "default"
    sandbox_kubeconfig: str = ""
    sandbox_toolbox: str = ""
    sandbox_proxy: str = ""
    sandbox_proxy_labels: tuple[str, ...] = ()
    sandbox_pull: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    sandbox_nodes: tuple[str, ...] = ()
    sandbox_tools: tuple[str, ...] = ()


S = TypeVar("S", bound=DriverSettings)


def with_runtime(settings: S, runtime: str) -> S:
    """With the runtime that a run file asks for, as they are where it asks for none. Raises `CannotIsolate`."""
    if not runtime:
        return settings
    if settings.sandbox_driver == "process":
        raise CannotIsolate(
            f"environment.runtime = {runtime!r}: sandboxes of driver process share this host's kernel; set "
            "OPENFORGE_SANDBOX_DRIVER to docker or kubernetes, or remove it"
        )
    return msgspec.structs.replace(settings, sandbox_runtime=runtime)


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
    if settings.sandbox_driver == "kubernetes":
        return await _kubernetes(settings, owner)
    from openforge.sandbox.process import ProcessDriver

    return ProcessDriver(state_dir, proxy_socket=proxy_socket, owner=owner, allow_reduced=allow_reduced)


async def _kubernetes(settings: DriverSettings, owner: str) -> SandboxDriver:
    try:
        from openforge.sandbox.kubernetes import KubernetesDriver
        from openforge.sandbox.kubernetes.pod import PodSettings
    except ModuleNotFoundError as missing:
        raise CannotIsolate(f"{missing.name} is not installed: pip install 'openforge[kubernetes]'") from missing
    if not settings.sandbox_toolbox:
        raise CannotIsolate("OPENFORGE_SANDBOX_TOOLBOX is not set: name the toolbox image (docs/isolation.md)")
    if settings.sandbox_proxy and not _ADDRESS.fullmatch(settings.sandbox_proxy):
        raise CannotIsolate(
            f"OPENFORGE_SANDBOX_PROXY = {settings.sandbox_proxy!r} is no IP:PORT: sandboxes know no names, so use the "
            "address of the proxy's Service"
        )
    shape = PodSettings(
        toolbox=settings.sandbox_toolbox,
        proxy=settings.sandbox_proxy,
        proxy_labels=_pairs(settings.sandbox_proxy_labels),
        tools=_pairs(settings.sandbox_tools),
        runtime_class=settings.sandbox_runtime,
        pull=settings.sandbox_pull,
        node_selector=_pairs(settings.sandbox_nodes),
    )
    driver = KubernetesDriver(
        shape,
        owner=owner,
        namespace=settings.sandbox_namespace,
        kubeconfig=settings.sandbox_kubeconfig,
        image=settings.sandbox_image,
    )
    return await driver.start()


def _pairs(texts: tuple[str, ...]) -> dict[str, str]:
    return {key: value for key, _, value in (text.partition("=") for text in texts)}
