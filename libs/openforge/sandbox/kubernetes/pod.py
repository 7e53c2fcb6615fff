"""What a sandbox is as objects of a cluster.

Promises: the pod passes the Pod Security level `restricted`; it holds no token, no secret and no environment; every
place that can be written is a memory volume with a size; nothing can reach it and it reaches only what its network
mode says.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from openforge.sandbox.contract import SandboxSpec
from openforge.sandbox.process.host import INIT_FOLDER

LABEL = "openforge.dev/"
ANNOTATION = "openforge.dev/labels"
USER = 1000
INIT = (
    f"{INIT_FOLDER}/lib/loader",
    "--library-path",
    f"{INIT_FOLDER}/lib",
    f"{INIT_FOLDER}/bin/python",
    "-I",
    "-S",
    f"{INIT_FOLDER}/inside.pyc",
)
FOLDERS = {"/workspace": "workspace", "/tests": "tests", "/tmp": "tmp", "/var/tmp": "var-tmp"}
_BESIDE_WORKSPACE_MB = 64
_RUNTIME, _SPACE, _SPACE_PLACE = "openforge-runtime", "openforge-space", "/openforge-space"
TOOLBOX_RUNTIME = "/openforge/runtime"


class PodSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`toolbox` is the image that brings our init (`python -m openforge.sandbox.kubernetes.toolbox FOLDER` writes what
    is in it), `proxy` the address (IP:PORT) of the model proxy as pods reach it, `proxy_labels` the pods behind it.
    `tools` are folders that every sandbox shows, each from the image that it names, read-only; a folder without an
    image is one that the sandboxes' own images hold.
    """

    toolbox: str
    proxy: str = ""
    proxy_labels: Mapping[str, str] = {}
    tools: Mapping[str, str] = {}
    runtime_class: str = ""
    pull: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    node_selector: Mapping[str, str] = {}


def pod(name: str, image: str, spec: SandboxSpec, settings: PodSettings, labels: Mapping[str, str]) -> dict[str, Any]:
    ways = [f"{spec.proxy_port}={settings.proxy}"] if spec.network != "none" and settings.proxy else []
    more: dict[str, Any] = {"runtimeClassName": settings.runtime_class} if settings.runtime_class else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": dict(labels),
            "annotations": {ANNOTATION: msgspec.json.encode(dict(spec.labels)).decode()},
        },
        "spec": {
            **more,
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 0,
            "activeDeadlineSeconds": max(1, int(spec.ttl_s) + 60),
            "hostname": "sandbox",
            "nodeSelector": dict(settings.node_selector),
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "initContainers": [_toolbox(settings)],
            "containers": [_box(image, spec, settings, [*INIT, "hold", *ways])],
            "volumes": [*_volumes(spec), *_tool_volumes(settings)],
        },
    }


def _toolbox(settings: PodSettings) -> dict[str, Any]:
    """Copies the init, and makes the folders, so that they are the sandbox's user's."""
    folders = " ".join(f"{_SPACE_PLACE}/{name}" for name in FOLDERS.values())
    return {
        "name": "toolbox",
        "image": settings.toolbox,
        "imagePullPolicy": settings.pull,
        "command": ["/bin/sh", "-c", f"cp -a {TOOLBOX_RUNTIME}/. {INIT_FOLDER}/ && mkdir -p {folders}"],
        "securityContext": _restricted(),
        "resources": _resources({"cpu": "100m", "memory": "64Mi"}),
        "volumeMounts": [
            {"name": _RUNTIME, "mountPath": INIT_FOLDER},
            {"name": _SPACE, "mountPath": _SPACE_PLACE},
        ],
    }


def _box(image: str, spec: SandboxSpec, settings: PodSettings, command: Sequence[str]) -> dict[str, Any]:
    limits = spec.limits
    folders = [{"name": _SPACE, "mountPath": place, "subPath": name} for place, name in FOLDERS.items()]
    return {
        "name": "box",
        "image": image,
        "imagePullPolicy": settings.pull,
        "command": list(command),
        "workingDir": "/",
        "securityContext": _restricted(),
        "resources": _resources({"cpu": f"{max(1, int(limits.cpus * 1000))}m", "memory": f"{limits.memory_mb}Mi"}),
        "volumeMounts": [
            {"name": _RUNTIME, "mountPath": INIT_FOLDER, "readOnly": True},
            *folders,
            *_tool_mounts(settings),
        ],
    }


def _restricted() -> dict[str, Any]:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _resources(amounts: dict[str, str]) -> dict[str, Any]:
    return {"requests": amounts, "limits": amounts}


def _volumes(spec: SandboxSpec) -> list[dict[str, Any]]:
    """Sizes are those of files: what is in memory counts against the pod's memory too."""
    space = f"{spec.limits.disk_mb + _BESIDE_WORKSPACE_MB}Mi"
    return [
        {"name": _RUNTIME, "emptyDir": {"sizeLimit": "64Mi"}},
        {"name": _SPACE, "emptyDir": {"medium": "Memory", "sizeLimit": space}},
    ]


def _tools(settings: PodSettings) -> Iterator[tuple[str, str, str]]:
    """A name for the volume, the folder, the image."""
    for number, (folder, image) in enumerate(sorted(settings.tools.items())):
        if image:
            yield f"tools-{number}", folder, image


def _tool_volumes(settings: PodSettings) -> list[dict[str, Any]]:
    return [
        {"name": name, "image": {"reference": image, "pullPolicy": settings.pull}}
        for name, _, image in _tools(settings)
    ]


def _tool_mounts(settings: PodSettings) -> list[dict[str, Any]]:
    return [{"name": name, "mountPath": folder, "readOnly": True} for name, folder, _ in _tools(settings)]


def nothing_in_or_out(name: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """The policy for all sandboxes of this owner's namespace."""
    return _policy(name, labels, [])


def out_to_proxy(name: str, labels: Mapping[str, str], settings: PodSettings) -> dict[str, Any]:
    """To the pods behind the proxy's address, by no name: there is no DNS, which would carry anything out."""
    port = int(settings.proxy.rpartition(":")[2])
    there = {"podSelector": {"matchLabels": dict(settings.proxy_labels)}, "namespaceSelector": {}}
    return _policy(name, labels, [{"to": [there], "ports": [{"protocol": "TCP", "port": port}]}])


def _policy(name: str, labels: Mapping[str, str], egress: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name},
        "spec": {
            "podSelector": {"matchLabels": dict(labels)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [],
            "egress": egress,
        },
    }
