"""What passes the gate before a Docker daemon: decided from the request alone.

Promises: nothing passes but what `DockerDriver` asks for; a container that passes has no privilege, no network, no
namespace of the host's, a root that cannot be written, and sees of the host only folders below those that are named,
read-only.
"""

import os.path
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from openforge.sandbox.docker.container import LABEL, TO_GIVE_FOLDERS_AWAY

_BODY = {
    *("Image", "Entrypoint", "Cmd", "User", "Hostname", "WorkingDir", "Labels", "StopSignal", "Healthcheck"),
    "HostConfig",
}
_HOST = {
    *("NetworkMode", "ReadonlyRootfs", "CapDrop", "CapAdd", "SecurityOpt", "AutoRemove", "IpcMode", "ShmSize"),
    *("Tmpfs", "Mounts", "Memory", "MemorySwap", "PidsLimit", "NanoCpus", "Runtime"),
}
_FIXED = {
    "NetworkMode": "none",
    "ReadonlyRootfs": True,
    "CapDrop": ["ALL"],
    "SecurityOpt": ["no-new-privileges"],
    "IpcMode": "private",
}
_LIMITS = ("Memory", "MemorySwap", "PidsLimit", "NanoCpus")
_PLAIN = re.compile(r"(/[A-Za-z0-9_][A-Za-z0-9_.:@-]*)+")
_BIND = {"Type", "Source", "Target", "ReadOnly"}
_MEMORY = {"Type", "Target", "TmpfsOptions"}


def why_not(
    body: Mapping[str, Any], folders: Sequence[Path], runtimes: Sequence[str] = (), *, podman: bool = False
) -> str:
    """Why a container of this body may not be made; empty where it may. `podman`: its first process may be root."""
    return next(_faults(body, folders, runtimes, podman), "")


def why_not_start(found: Mapping[str, Any], folders: Sequence[Path]) -> str:
    """Why a container that the daemon describes so may not be started: a folder that it shows leads elsewhere now."""
    host = found.get("HostConfig") or {}
    shown = [mount["Source"] for mount in host.get("Mounts") or [] if mount["Type"] != "tmpfs"]
    shown += [bind.partition(":")[0] for bind in host.get("Binds") or []]  # Podman tells them here
    return next(_shown(shown, folders), "")


def plain(path: str) -> bool:
    """Whether every client and every server understands this path alike."""
    return _PLAIN.fullmatch(path) is not None


def ours(labels: Mapping[str, str] | None) -> bool:
    """Whether a container was made by a driver of ours."""
    return f"{LABEL}sandbox" in (labels or {})


def only_ours(filters: Mapping[str, Any]) -> bool:
    """Whether these filters of a list name a driver's own label."""
    named = filters.get("label") or []
    return bool(named) and all(isinstance(label, str) and label.startswith(f"{LABEL}home=") for label in named)


def _faults(body: Mapping[str, Any], folders: Sequence[Path], runtimes: Sequence[str], podman: bool) -> Iterator[str]:
    host = body.get("HostConfig")
    if not isinstance(host, dict):
        yield "HostConfig is missing"
        return
    yield from (f"{field} is nothing that the driver asks for" for field in sorted(body.keys() - _BODY))
    yield from (f"HostConfig.{field} is nothing that the driver asks for" for field in sorted(host.keys() - _HOST))
    yield from (f"HostConfig.{name} has to be {value!r}" for name, value in _FIXED.items() if host.get(name) != value)
    yield from (f"HostConfig.{name} has to be a limit" for name in _LIMITS if not _limit(host.get(name)))
    if not ours(body.get("Labels")):
        yield f"Labels have to name {LABEL}sandbox"
    yield from _rights(body.get("User"), host.get("CapAdd") or [], podman)
    if host.get("Runtime", "") not in ("", *runtimes):
        yield f"HostConfig.Runtime = {host['Runtime']!r} is none that may be used: name it in OPENFORGE_GATE_RUNTIMES"
    for mount in host.get("Mounts") or []:
        yield from _mount(mount, folders)


def _limit(value: Any) -> bool:
    return isinstance(value, int) and value > 0


def _rights(user: Any, added: Sequence[str], podman: bool) -> Iterator[str]:
    """An ordinary user; or, for Podman, where the init gives folders away first, root with just what that takes."""
    hint = "" if podman else ", or set OPENFORGE_GATE_PODMAN where the daemon is Podman"
    if not set(added) <= set(TO_GIVE_FOLDERS_AWAY if podman else ()):
        yield f"HostConfig.CapAdd = {list(added)!r} is more than the driver asks for{hint}"
    if user != "1000:1000" and not (podman and user == "0:0" and added):
        yield f"User = {user!r} has to be 1000:1000{hint}"


def _mount(mount: Any, folders: Sequence[Path]) -> Iterator[str]:
    match mount:
        case {"Type": "tmpfs", "Target": str()} if mount.keys() <= _MEMORY:
            return
        case {"Type": "bind", "Source": str(source), "Target": str(), "ReadOnly": True} if mount.keys() <= _BIND:
            yield from _shown([source], folders)
        case _:
            yield f"HostConfig.Mounts: {mount!r} is no memory folder and no read-only folder"


def _shown(sources: Sequence[str], folders: Sequence[Path]) -> Iterator[str]:
    for source in sources:
        if not any(below(source, folder) for folder in folders):
            yield f"the folder {source!r} may not be shown to a sandbox"


def below(source: str, folder: Path) -> bool:
    """Really below, whatever links there are on the way."""
    return os.path.isabs(source) and Path(os.path.realpath(source)).is_relative_to(folder.resolve())
