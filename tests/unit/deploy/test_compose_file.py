"""deploy/compose/compose.yaml as it stands: who is locked in, who sees what, and whether the services understand it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from openforge.bus import BusSettings
from openforge.bus.permissions import OPERATOR, ROLES
from openforge.engine.settings import Settings as Engine
from openforge.learner.settings import Settings as Learner
from openforge.proxy.settings import Settings as Proxy
from openforge.sandbox.docker.gate.serve import Settings as Gate
from openforge.sandbox_manager.settings import Settings as SandboxManager
from openforge.scheduler.settings import Settings as Scheduler
from openforge.service import settings_from_env
from openforge.verifier.settings import Settings as Verifier

FOLDER = Path(__file__).parents[3] / "deploy" / "compose"
DOCS = FOLDER.parents[1] / "docs"
SETTINGS: dict[str, type[msgspec.Struct]] = {
    "scheduler": Scheduler,
    "proxy": Proxy,
    "engine": Engine,
    "engine-gpu": Engine,
    "learner": Learner,
    "verifier": Verifier,
    "sandbox-manager": SandboxManager,
    "gate": Gate,
}
ROLE_OF = {name: name.replace("-", "_").removesuffix("_gpu") for name in SETTINGS if name != "gate"}
ROLE_OF |= {"metrics": "metrics", "streams": OPERATOR, "cli": OPERATOR}
OF_ALL = {"OPENFORGE_RUN", "OPENFORGE_LOG_LEVEL", "OPENFORGE_METRICS_LISTEN"}
_VARIABLE = re.compile(r"\$\{([A-Z_]+)(?:(:?[-?])([^}]*))?\}")


def example() -> dict[str, str]:
    lines = (FOLDER / ".env.example").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def filled(value: Any, known: dict[str, str]) -> Any:
    """As compose reads it: a default after a colon stands for what is empty too."""

    def found(variable: re.Match[str]) -> str:
        name, kind, default = variable.groups("")
        told = known.get(name, "")
        return told if told or (name in known and not kind.startswith(":")) else default

    if isinstance(value, dict):
        return {key: filled(inner, known) for key, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner, known) for inner in value]
    return _VARIABLE.sub(found, value) if isinstance(value, str) else value


TEXT = (FOLDER / "compose.yaml").read_text()
SERVICES: dict[str, dict[str, Any]] = filled(yaml.safe_load(TEXT), example())["services"]


def mounts_of(service: str) -> Iterator[tuple[str, str, str]]:
    for volume in SERVICES[service].get("volumes", ()):
        source, target, *mode = volume.split(":")
        yield source, target, "".join(mode)


@pytest.mark.parametrize("name", SERVICES)
def test_everybody_is_locked_in(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["user"] == ("0:0" if name == "setup" else "10001:10001")
    assert not service.keys() & {"privileged", "pid", "ipc", "devices"}
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_one_service_holds_the_docker_socket_and_it_has_no_network() -> None:
    holders = [name for name in SERVICES for source, _, _ in mounts_of(name) if source == "/var/run/docker.sock"]
    assert holders == ["gate"]
    assert SERVICES["gate"]["network_mode"] == "none"


def test_each_service_sees_the_seed_of_its_own_role_and_cannot_change_it() -> None:
    seen = {
        name: (source.removeprefix("./secrets/"), mode)
        for name in SERVICES
        for source, target, mode in mounts_of(name)
        if target == "/run/secrets" and name != "grafana"
    }
    assert seen == {name: (role, "ro") for name, role in ROLE_OF.items()}
    assert set(ROLE_OF.values()) == {*ROLES, OPERATOR}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_service_gets_no_variable_that_it_does_not_read_and_accepts_all_it_gets(name: str, tmp_path: Path) -> None:
    env = {key: str(value) for key, value in SERVICES[name]["environment"].items()}
    own = {f"OPENFORGE_{field.name.upper()}" for field in msgspec.structs.fields(SETTINGS[name])}
    bus = {"OPENFORGE_NATS_URL", "OPENFORGE_NATS_NKEY_SEED_FILE"}
    assert {key for key in env if key.startswith("OPENFORGE_")} <= own | bus | OF_ALL
    settings_from_env(SETTINGS[name], env)
    if name != "gate":
        seed = tmp_path / "seed"
        seed.touch()
        assert BusSettings.from_env(env | {"OPENFORGE_NATS_NKEY_SEED_FILE": str(seed)}).url == "nats://nats:4222"


def test_what_the_daemon_is_told_to_show_is_at_the_same_path_everywhere_and_passes_the_gate() -> None:
    data = example()["OPENFORGE_DATA"]
    folders = SERVICES["gate"]["environment"]["OPENFORGE_GATE_FOLDERS"].split(",")
    for name in ("sandbox-manager", "verifier", "proxy", "gate"):
        of_data = [(source, target) for source, target, _ in mounts_of(name) if source.startswith(data)]
        assert of_data
        assert all(source == target for source, target in of_data)
    for name in ("sandbox-manager", "verifier"):
        env = SERVICES[name]["environment"]
        assert {env["OPENFORGE_HOME"], env.get("OPENFORGE_SOCKETS", env["OPENFORGE_HOME"])} <= set(folders)
        assert env["OPENFORGE_SANDBOX_SOCKET"] == SERVICES["gate"]["environment"]["OPENFORGE_GATE_SOCKET"]


def test_files_that_are_shown_to_containers_are_in_the_repository() -> None:
    shown = {
        source
        for name in SERVICES
        for source, _, _ in mounts_of(name)
        if source.startswith(".") and "/secrets" not in source
    }
    assert {"./nats.conf", "./setup.sh", "../observability/dashboard.json"} <= shown
    assert [source for source in shown if not (FOLDER / source).exists()] == []


def test_the_example_names_only_variables_that_are_read_and_every_one_without_a_default() -> None:
    read = {found[1]: found[2] for found in _VARIABLE.finditer(TEXT)}
    assert example().keys() <= {*read, "COMPOSE_PROFILES"}
    assert {name for name, kind in read.items() if kind == ":?"} <= example().keys()


@pytest.mark.parametrize(
    ("told", "made"), [({}, "tiny"), ({"OPENFORGE_MODEL": ""}, ""), ({"OPENFORGE_MODEL": "m"}, "m")]
)
def test_no_model_is_made_where_the_variable_is_empty(told: dict[str, str], made: str) -> None:
    command = filled(yaml.safe_load(TEXT)["services"]["model"]["command"], told)
    assert command[-1] == f"test -z '{made}' || python -m openforge.models '{made}'"


def test_models_are_copied_by_the_service_that_may_write_them() -> None:
    (told,) = re.findall(r"docker compose cp FOLDER ([a-z-]+):/models/", (DOCS / "deploy-compose.md").read_text())
    assert ("models", "/models", "") in mounts_of(told)


def test_keys_of_a_judge_and_of_a_bucket_reach_those_who_ask_there_and_are_in_no_commit() -> None:
    files = {name: service["env_file"] for name, service in SERVICES.items() if "env_file" in service}
    weights = [{"path": "./weights.env", "required": False}]
    assert files == {
        "verifier": [{"path": "./verifier.env", "required": False}],
        **dict.fromkeys(("engine", "engine-gpu", "learner"), weights),
    }
    ignored = (DOCS.parent / ".gitignore").read_text().splitlines()
    assert {"/deploy/compose/verifier.env", "/deploy/compose/weights.env"} <= set(ignored)


@pytest.mark.parametrize("name", ["engine", "engine-gpu"])
def test_an_engine_has_a_place_for_weights_that_it_fetches(name: str) -> None:
    assert ("weight-cache", SERVICES[name]["environment"]["OPENFORGE_WEIGHT_CACHE"], "") in mounts_of(name)


def test_runtimes_that_are_named_reach_the_gate() -> None:
    told = filled(yaml.safe_load(TEXT)["services"]["gate"]["environment"], {"OPENFORGE_GATE_RUNTIMES": "runsc,kata"})
    assert settings_from_env(Gate, told).gate_runtimes == ("runsc", "kata")


def test_prometheus_looks_at_services_that_are_there_and_traces_end_in_exporters_that_are_configured() -> None:
    scraped = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())["scrape_configs"]
    targets = [
        target.split(":")[0] for job in scraped for static in job["static_configs"] for target in static["targets"]
    ]
    assert set(targets) == {"metrics", "scheduler", "proxy", "engine", "learner", "sandbox-manager", "verifier"}
    collector = yaml.safe_load((FOLDER / "otel-collector.yaml").read_text())
    for pipeline in collector["service"]["pipelines"].values():
        for kind, names in pipeline.items():
            assert set(names) <= collector[kind].keys()
