"""The rendered manifests: of the published schemas, of the house's policies, and in the words that services read."""

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
from manifests import (
    OVERLAYS,
    WORKLOADS,
    Object,
    container_of,
    environment_of,
    labels_of,
    name_of,
    namespace_of,
    of_kind,
    pod_of,
    ran_secrets,
    rendered,
    replicas_of,
    secrets_of,
)

from openforge.bus import BusSettings
from openforge.bus.permissions import OPERATOR, ROLES
from openforge.engine.settings import Settings as Engine
from openforge.learner.settings import Settings as Learner
from openforge.proxy.settings import Settings as Proxy
from openforge.runs.metrics import METRICS, STAGES
from openforge.sandbox.kubernetes import cluster, stream
from openforge.sandbox.kubernetes.pod import LABEL
from openforge.sandbox_manager.settings import Settings as SandboxManager
from openforge.scheduler.settings import Settings as Scheduler
from openforge.service.settings import settings_from_env
from openforge.verifier.settings import Settings as Verifier

LIBS = Path(__file__).parents[3] / "libs" / "openforge"
SETTINGS: dict[str, type[msgspec.Struct]] = {
    "engine": Engine,
    "learner": Learner,
    "proxy": Proxy,
    "sandbox_manager": SandboxManager,
    "scheduler": Scheduler,
    "verifier": Verifier,
}
NAME = "app.kubernetes.io/name"
OURS = "openforge"
FIELDS = {"metadata.name": "pod-0", "status.podIP": "10.0.0.1"}
LINKS = {"PROXY_SERVICE_HOST": "10.96.0.7"}


@pytest.fixture(params=OVERLAYS)
def objects(request: pytest.FixtureRequest) -> tuple[Object, ...]:
    return rendered(request.param)


def workloads(objects: tuple[Object, ...]) -> list[Object]:
    return list(of_kind(objects, *WORKLOADS))


def services_of(objects: tuple[Object, ...]) -> dict[str, Object]:
    label = "openforge.dev/service"
    return {found["metadata"]["labels"][label]: found for found in workloads(objects) if _label(found, label)}


def _label(found: Object, label: str) -> str:
    return str(found["metadata"].get("labels", {}).get(label, ""))


def selects(selector: Object, labels: dict[str, str]) -> bool:
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


# Schemas


@pytest.mark.parametrize("version", ["1.33", "1.37"])
def test_every_object_is_of_the_published_schema_with_no_field_unknown_to_it(
    objects: tuple[Object, ...], version: str
) -> None:
    for found in objects:
        kubernetes_validate.validate(found, version, strict=True)


def test_a_field_that_the_schema_does_not_know_would_be_found() -> None:
    (deployment,) = (found for found in rendered("local-cpu") if name_of(found) == "scheduler")
    spoilt: Any = msgspec.json.decode(msgspec.json.encode(deployment))
    spoilt["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenesProbe"):
        kubernetes_validate.validate(spoilt, "1.37", strict=True)


def test_all_services_are_there_and_both_overlays_make_the_same_objects() -> None:
    made = [{(found["kind"], name_of(found).split("-")[0]) for found in rendered(overlay)} for overlay in OVERLAYS]
    assert made[0] ^ made[1] == {("Job", "model"), ("NetworkPolicy", "broadcast")}
    for overlay in OVERLAYS:
        assert services_of(rendered(overlay)).keys() == SETTINGS.keys()


# Pods


def test_namespaces_admit_restricted_pods_only(objects: tuple[Object, ...]) -> None:
    for namespace in of_kind(objects, "Namespace"):
        assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_every_pod_is_one_of_a_user_without_rights_on_a_root_that_nobody_writes(objects: tuple[Object, ...]) -> None:
    for workload in workloads(objects):
        pod, own = pod_of(workload), container_of(workload)["securityContext"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert own["allowPrivilegeEscalation"] is False
        assert own["readOnlyRootFilesystem"] is True
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert not own.keys() & {"privileged", "procMount"}
        assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC"}
        assert not [volume for volume in pod["volumes"] if "hostPath" in volume]


def test_every_container_has_requests_limits_and_an_image_of_one_version(objects: tuple[Object, ...]) -> None:
    for workload in workloads(objects):
        container = container_of(workload)
        for amounts in ("requests", "limits"):
            assert {"cpu", "memory"} <= container["resources"][amounts].keys()
        tag = container["image"].rpartition(":")[2]
        assert re.match(r"\d+\.\d+\.\d+", tag), container["image"]


def test_every_memory_or_scratch_volume_has_a_size(objects: tuple[Object, ...]) -> None:
    for workload in workloads(objects):
        for volume in pod_of(workload)["volumes"]:
            assert "emptyDir" not in volume or "sizeLimit" in volume["emptyDir"], (name_of(workload), volume)


def test_what_runs_for_long_is_probed(objects: tuple[Object, ...]) -> None:
    for workload in workloads(objects):
        container = container_of(workload)
        if name_of(workload) in ("bus-set-up", "model"):
            continue  # they end
        assert "livenessProbe" in container
        assert "readinessProbe" in container or name_of(workload) == "learner"
        for probe in (container[name] for name in container if name.endswith("Probe")):
            if "httpGet" in probe:
                assert probe["httpGet"]["port"] in {
                    part for port in container.get("ports", ()) for part in port.values()
                }


def test_secrets_are_files_that_others_cannot_read_and_no_variable_holds_one_but_keys_of_others(
    objects: tuple[Object, ...],
) -> None:
    assert not list(of_kind(objects, "Secret"))
    for workload in workloads(objects):
        for volume in pod_of(workload)["volumes"]:
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] & 0o007 == 0
        for variable in container_of(workload).get("env", ()):
            assert "secretKeyRef" not in variable.get("valueFrom", {})
        told = [source["secretRef"] for source in container_of(workload).get("envFrom", ()) if "secretRef" in source]
        of_others = {"verifier": "verifier-env", "engine": "weights-env", "learner": "weights-env"}  # a judge, a bucket
        asked = of_others.get(name_of(workload))
        assert told == ([{"name": asked, "optional": True}] if asked else [])


def test_each_client_of_the_bus_has_the_seed_of_its_own_role(objects: tuple[Object, ...]) -> None:
    held = {
        name_of(workload): volume["secret"]["secretName"].removeprefix("nkey-").replace("-", "_")
        for workload in workloads(objects)
        for volume in pod_of(workload)["volumes"]
        if volume["name"] == "nkey"
    }
    assert set(held.values()) == {OPERATOR, *ROLES}
    for service, workload in services_of(objects).items():
        assert held[name_of(workload)] == service
    assert held["bus-set-up"] == OPERATOR
    assert [name for name, role in held.items() if role == OPERATOR] == ["bus-set-up"]


def test_a_budget_lets_one_pod_go_of_whatever_has_several(objects: tuple[Object, ...]) -> None:
    budgets = list(of_kind(objects, "PodDisruptionBudget"))
    for budget in budgets:
        assert budget["spec"]["maxUnavailable"] == 1
        assert [found for found in workloads(objects) if selects(budget["spec"]["selector"], labels_of(found))]
    for workload in of_kind(objects, "Deployment", "StatefulSet"):
        if replicas_of(workload) > 1:
            assert [budget for budget in budgets if selects(budget["spec"]["selector"], labels_of(workload))]


def test_selectors_volumes_and_names_lead_to_what_is_there(objects: tuple[Object, ...]) -> None:
    config_maps = {name_of(found) for found in of_kind(objects, "ConfigMap")}
    claims = {name_of(found) for found in of_kind(objects, "PersistentVolumeClaim")}
    accounts = {name_of(found) for found in of_kind(objects, "ServiceAccount")}
    for workload in workloads(objects):
        pod = pod_of(workload)
        volumes = {volume["name"] for volume in pod["volumes"]}
        volumes |= {name_of(claim) for claim in workload["spec"].get("volumeClaimTemplates", ())}
        assert {mount["name"] for mount in container_of(workload)["volumeMounts"]} == volumes
        assert pod["serviceAccountName"] in accounts
        for volume in pod["volumes"]:
            assert volume.get("configMap", {}).get("name", "") in {"", *config_maps}
            assert volume.get("persistentVolumeClaim", {}).get("claimName", "") in {"", *claims}
        if "selector" in workload["spec"]:
            assert selects(workload["spec"]["selector"], labels_of(workload))
    for service in of_kind(objects, "Service"):
        assert [
            found for found in workloads(objects) if service["spec"]["selector"].items() <= labels_of(found).items()
        ]
    for scaler in of_kind(objects, "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        (scaled,) = (found for found in of_kind(objects, target["kind"]) if name_of(found) == target["name"])
        assert "replicas" not in scaled["spec"]  # or each apply would undo what it decided


# Network


def policies(objects: tuple[Object, ...], namespace: str, labels: dict[str, str], way: str) -> Iterator[Object]:
    for policy in of_kind(objects, "NetworkPolicy"):
        if namespace_of(policy) == namespace and selects(policy["spec"]["podSelector"], labels):
            yield from policy["spec"].get(way, ())


def test_nothing_goes_in_or_out_by_default(objects: tuple[Object, ...]) -> None:
    for namespace in of_kind(objects, "Namespace"):
        (closed,) = (
            found
            for found in of_kind(objects, "NetworkPolicy")
            if namespace_of(found) == name_of(namespace)
            and found["spec"].get("policyTypes") == ["Ingress", "Egress"]
            and found["spec"]["podSelector"] == {}
        )
        assert not closed["spec"].keys() & {"ingress", "egress"}


def test_sandboxes_reach_the_proxy_and_nothing_else(objects: tuple[Object, ...]) -> None:
    for network, expected in (("none", 0), ("proxy-only", 1)):
        labels = {f"{LABEL}network": network, f"{LABEL}owner": "manager"}
        ways = list(policies(objects, "openforge-sandboxes", labels, "egress"))
        assert len(ways) == expected
        assert list(policies(objects, "openforge-sandboxes", labels, "ingress")) == []
        for way in ways:
            (there,) = way["to"]
            assert there["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": OURS}}
            assert there["podSelector"] == {"matchLabels": {NAME: "proxy"}}


def test_only_sandboxes_come_to_the_proxy_and_only_the_proxy_to_the_engines(objects: tuple[Object, ...]) -> None:
    services = services_of(objects)
    for service, port, peer in (("proxy", 8400, "openforge-sandboxes"), ("engine", 8300, {NAME: "proxy"})):
        ways = list(policies(objects, OURS, labels_of(services[service]), "ingress"))
        (own,) = (way for way in ways if {"protocol": "TCP", "port": port} in way.get("ports", ()))
        (there,) = own["from"]
        told = there.get("namespaceSelector") or there["podSelector"]
        assert told["matchLabels"] in (peer, {"kubernetes.io/metadata.name": peer})
        others = {"proxy": {}, "engine": {"engine", "learner"}}[service]  # the group of a broadcast
        for way in ways:
            for peer_pod in way["from"] if "ports" not in way else ():
                assert set(peer_pod["podSelector"]["matchExpressions"][0]["values"]) == others


def test_every_client_of_the_bus_reaches_it_and_nobody_reaches_everything(objects: tuple[Object, ...]) -> None:
    for workload in workloads(objects):
        ways = list(policies(objects, OURS, labels_of(workload), "egress"))
        to_bus = [way for way in ways if {"protocol": "TCP", "port": 4222} in way.get("ports", ())]
        assert len(to_bus) == (name_of(workload) not in ("nats", "model"))
        for way in ways:
            assert way["to"]
            if any("ipBlock" in there for there in way["to"]):
                assert labels_of(workload)[f"{LABEL}api-server"] == "client"
                assert {port["port"] for port in way["ports"]} == {443, 6443}


def test_a_port_of_a_service_is_that_of_its_pods_since_policies_see_those(objects: tuple[Object, ...]) -> None:
    for service in of_kind(objects, "Service"):
        for port in service["spec"]["ports"]:
            assert port.get("targetPort", port["port"]) in (port["port"], port["name"])


# Rights


def test_the_role_allows_exactly_what_the_driver_calls(objects: tuple[Object, ...]) -> None:
    source = Path(cluster.__file__).read_text() + Path(stream.__file__).read_text()
    called = set(re.findall(r"\.([a-z]+)_namespaced_(pod|network_policy)\b", source))
    called |= {("watch", "pod")} if ".stream(\n" in source and "watch.Watch()" in source else set()
    resources = {"pod": "pods", "network_policy": "networkpolicies"}
    (role,) = of_kind(objects, "Role")
    allowed = {(verb, resource) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    execs = {("create", "pods/exec"), ("get", "pods/exec")}
    assert "connect_get_namespaced_pod_exec" in source
    assert allowed == {(verb, resources[kind]) for verb, kind in called} | execs


def test_only_makers_of_sandboxes_have_rights_and_a_token(objects: tuple[Object, ...]) -> None:
    assert not list(of_kind(objects, "ClusterRole", "ClusterRoleBinding"))
    (binding,) = of_kind(objects, "RoleBinding")
    assert namespace_of(binding) == "openforge-sandboxes"
    (subject,) = binding["subjects"]
    for workload in workloads(objects):
        makes = subject["name"] == pod_of(workload)["serviceAccountName"]
        assert pod_of(workload)["automountServiceAccountToken"] is makes
        assert makes == (name_of(workload) in ("sandbox-manager", "verifier"))


# The words of the services


def read_by(service: str) -> set[str]:
    """The variables that a service reads: its own settings', and those of what it is made of."""
    own = {f"OPENFORGE_{field.name.upper()}" for field in msgspec.structs.fields(SETTINGS[service])}
    parts = [*(LIBS / "bus").glob("*.py"), *(LIBS / "service").glob("*.py"), LIBS / "runs" / "model.py"]
    text = "\n".join(part.read_text() for part in parts)
    credentials = {f"OPENFORGE_NATS_{name.upper()}" for name in ("nkey_seed_file", "tls_ca")}
    return own | set(re.findall(r'"(OPENFORGE_[A-Z_]+)"', text)) | credentials


@pytest.mark.parametrize("service", SETTINGS)
def test_a_service_gets_no_variable_that_it_does_not_read_and_accepts_all_it_gets(
    objects: tuple[Object, ...], service: str, tmp_path: Path
) -> None:
    env = environment_of(services_of(objects)[service], objects, FIELDS, LINKS)
    ours = {name for name in env if name.startswith("OPENFORGE_")}
    assert ours - read_by(service) == set()
    assert not [value for value in env.values() if "$(" in value]
    settings_from_env(SETTINGS[service], env)
    for file in ("OPENFORGE_NATS_TLS_CA", "OPENFORGE_NATS_NKEY_SEED_FILE"):
        mounts = container_of(services_of(objects)[service])["volumeMounts"]
        assert str(Path(env[file]).parent) in {mount["mountPath"] for mount in mounts}
        (tmp_path / file).touch()
        env[file] = str(tmp_path / file)
    bus = BusSettings.from_env(env)
    assert len(bus.servers()) == 3
    assert bus.streams.replicas == 3


def test_numbers_that_stand_in_two_places_are_the_same(objects: tuple[Object, ...]) -> None:
    services = services_of(objects)
    env = {service: environment_of(found, objects, FIELDS, LINKS) for service, found in services.items()}
    assert env["scheduler"]["OPENFORGE_ENGINES"] == str(replicas_of(services["engine"]))
    assert env["proxy"]["OPENFORGE_PROXY_REPLICAS"] == str(replicas_of(services["proxy"]))
    learner = services["learner"]
    assert f"--nnodes={replicas_of(learner)}" in container_of(learner)["command"]
    assert learner["spec"]["completions"] == replicas_of(learner)
    assert env["sandbox_manager"]["OPENFORGE_SANDBOX_PROXY"] == "10.96.0.7:8400"
    assert env["sandbox_manager"]["OPENFORGE_SANDBOX_NAMESPACE"] == env["verifier"]["OPENFORGE_SANDBOX_NAMESPACE"]
    for service in ("sandbox_manager", "verifier"):
        for image in ("IMAGE", "TOOLBOX"):
            assert re.search(r":\d+\.\d+\.\d+$", env[service][f"OPENFORGE_SANDBOX_{image}"])
    key, _, value = env["sandbox_manager"]["OPENFORGE_SANDBOX_PROXY_LABELS"].partition("=")
    assert labels_of(services["proxy"])[key] == value


def test_what_scales_looks_at_a_number_that_is_exported(objects: tuple[Object, ...]) -> None:
    metrics = [
        metric["external"]["metric"]
        for scaler in of_kind(objects, "HorizontalPodAutoscaler")
        for metric in scaler["spec"]["metrics"]
    ]
    assert metrics
    for metric in metrics:
        assert METRICS[metric["name"]].labels == ("stage",)
        assert metric["selector"]["matchLabels"]["stage"] in STAGES


def test_the_program_of_each_service_is_a_module_of_that_service(objects: tuple[Object, ...]) -> None:
    for service, workload in services_of(objects).items():
        assert container_of(workload)["command"][-2:] == ["-m", f"openforge.{service}"]


def test_programs_are_there(objects: tuple[Object, ...]) -> None:
    for workload in workloads(objects):
        command = container_of(workload)["command"]
        if "-m" in command:
            package = command[command.index("-m") + 1]
            assert importlib.util.find_spec(f"{package}.__main__"), command


def test_probes_look_at_the_file_that_the_service_writes(objects: tuple[Object, ...]) -> None:
    for workload in services_of(objects).values():
        container = container_of(workload)
        env = environment_of(workload, objects, FIELDS, LINKS)
        assert str(Path(env["OPENFORGE_HEALTH_FILE"]).parent) in {
            mount["mountPath"] for mount in container["volumeMounts"]
        }
        for probe in (container[name] for name in container if name.endswith("Probe")):
            assert "$OPENFORGE_HEALTH_FILE" in probe["exec"]["command"][2]


# Secrets


def test_the_script_makes_the_secrets_that_the_pods_ask_for(tmp_path: Path) -> None:
    made = secrets_of(tmp_path, "tiny")
    asked = {
        volume["secret"]["secretName"]
        for workload in workloads(rendered("local-cpu"))
        for volume in pod_of(workload)["volumes"]
        if "secret" in volume
    }
    assert {name_of(secret) for secret in made} == asked
    for secret in made:
        kubernetes_validate.validate(secret, "1.37", strict=True)
        assert namespace_of(secret) == OURS
    again = secrets_of(tmp_path, "tiny")
    assert seeds(again) == seeds(made)


def test_the_script_says_what_openssl_says(tmp_path: Path) -> None:
    broken = tmp_path / "openssl"
    broken.write_text("#!/bin/sh\necho no such curve >&2\nexit 3\n")
    broken.chmod(0o755)
    done = ran_secrets(tmp_path / "keys", "tiny", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 1
    assert done.stderr.endswith("openssl 3 is needed and failed: openssl req: no such curve\n")
    assert done.stdout == ""


def seeds(secrets: tuple[Object, ...]) -> dict[str, Object]:
    return {name_of(secret): secret["data"] for secret in secrets if name_of(secret).startswith("nkey-")}
