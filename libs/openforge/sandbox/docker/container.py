"""What a container is asked to be, as the body of the API's `create`.

Promises: for whatever the sandbox runs no capability, no new privileges, no user but an ordinary one, no network but
its own loopback, a root that cannot be written; every place that can be written has a size; nothing secret is in it,
since commands get their environment later, by way of the init.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from openforge.sandbox.contract import SandboxLimits, SandboxSpec
from openforge.sandbox.process.driver import SHM_MB, TESTS_MB, TMP_MB
from openforge.sandbox.process.host import INIT_FOLDER

CONTROL_FOLDER = "/run/openforge-control"
LABEL = "openforge."
_USER = 1000
_VAR_TMP_MB = 16
OWN_FOLDERS = ("/workspace", "/tests", "/tmp", "/var/tmp")  # runc gives a memory folder the mode of the image's
TO_GIVE_FOLDERS_AWAY = ["CHOWN", "SETGID", "SETPCAP", "SETUID"]
_OWN_PROCESSES = 4  # our init, one that it is about to start, and the runtime's own while it starts


def body(
    spec: SandboxSpec,
    image: str,
    init: Sequence[str],
    arguments: Sequence[str],
    *,
    binds: Mapping[str, str],
    volumes: Sequence[str],
    labels: Mapping[str, str],
    runtime: str,
    podman: bool,
) -> dict[str, Any]:
    """`binds` maps folders inside to folders of the host, also where a memory folder would be; `volumes` are places
    that the image would have on disk.

    Docker makes a memory folder any user's. Podman makes it root's, so there the init starts as
    root, gives the folders away and becomes the user, before it reports.
    """
    own = [place for place in OWN_FOLDERS if place not in binds]
    first = [f"user={','.join((str(_USER), *own))}"] if podman else []
    return {
        "Image": image,
        "Entrypoint": [*init, *first, *arguments],
        "Cmd": [],
        "User": "0:0" if podman else f"{_USER}:{_USER}",
        "Hostname": "sandbox",
        "WorkingDir": "/",
        "Labels": dict(labels),
        "StopSignal": "SIGKILL",
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": {
            "NetworkMode": "none",
            "ReadonlyRootfs": True,
            "CapDrop": ["ALL"],
            "CapAdd": TO_GIVE_FOLDERS_AWAY if podman else [],
            "SecurityOpt": ["no-new-privileges"],
            "AutoRemove": True,
            "IpcMode": "private",
            "ShmSize": SHM_MB << 20,
            "Tmpfs": {place: options for place, options in _tmpfs(spec.limits, podman).items() if place in own},
            "Mounts": [*_bound(binds), *(_volume(place, spec.limits.disk_mb) for place in volumes)],
            **_limits(spec.limits),
            **({"Runtime": runtime} if runtime else {}),
        },
    }


def _limits(limits: SandboxLimits) -> dict[str, int]:
    memory = limits.memory_mb << 20
    return {
        "Memory": memory,
        "MemorySwap": memory,
        "PidsLimit": limits.pids + _OWN_PROCESSES,
        "NanoCpus": int(limits.cpus * 1e9),
    }


def _tmpfs(limits: SandboxLimits, podman: bool) -> dict[str, str]:
    owner = "" if podman else f",uid={_USER},gid={_USER}"
    return {
        "/workspace": f"rw,exec,nosuid,nodev,size={limits.disk_mb}m,mode=755{owner}",
        "/tests": f"rw,exec,nosuid,nodev,size={TESTS_MB}m,mode=755{owner}",
        "/tmp": f"rw,exec,nosuid,nodev,size={TMP_MB}m,mode=1777{owner}",
        "/var/tmp": f"rw,exec,nosuid,nodev,size={_VAR_TMP_MB}m,mode=1777{owner}",
    }


def _bound(binds: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {"Type": "bind", "Source": outside, "Target": inside, "ReadOnly": True}
        for inside, outside in sorted(binds.items())
    ]


def _volume(place: str, size_mb: int) -> dict[str, Any]:
    options = {"SizeBytes": size_mb << 20, "Mode": 0o1777}
    return {"Type": "tmpfs", "Target": place, "TmpfsOptions": options}


def own_binds(runtime: str, control: str) -> dict[str, str]:
    return {INIT_FOLDER: runtime, CONTROL_FOLDER: control}
