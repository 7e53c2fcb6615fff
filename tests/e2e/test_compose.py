"""The deployment of deploy/compose at work: real images, a real dockerd, a run submitted from outside."""

import subprocess
import time
from collections.abc import Iterator

import pytest
from compose_world import Deployment, deployment
from host_image import ROOT

pytestmark = pytest.mark.compose

RUN = "composed"
SETS = (f"run.name={RUN}", "run.steps=4", "pacing.groups_per_step=2", "pacing.group_size=4", "pacing.in_flight=8")
EVALUATED = ("evaluation.heldout_episodes=8",)


@pytest.fixture(scope="module")
def deployed() -> Iterator[Deployment]:
    with deployment(RUN) as made:
        yield made
        made.compose("down", "--volumes", "--remove-orphans", "--timeout", "60")
        assert made.leftovers() == []


def trained(deployed: Deployment) -> "subprocess.Popen[bytes]":
    sets = [argument for override in (*SETS, *EVALUATED) for argument in ("--set", override)]
    return deployed.openforge("train", str(ROOT / "examples" / "tiny.toml"), "--remote", deployed.url, *sets)


def version_of(deployed: Deployment) -> int:
    said, _ = deployed.openforge("tail", RUN, "--once", "--fact", "BatchTrained").communicate()
    return len(said.splitlines())


def version_reached(deployed: Deployment, run: "subprocess.Popen[bytes]", version: int, within_s: float = 300) -> None:
    deadline = time.monotonic() + within_s
    while version_of(deployed) < version:
        assert run.poll() is None, said_by(run, deployed)
        assert time.monotonic() < deadline, deployed.logs()
        time.sleep(1)


def said_by(run: "subprocess.Popen[bytes]", deployed: Deployment) -> str:
    said, _ = run.communicate()
    return f"{said.decode(errors='replace')}\n{deployed.logs()}"


def test_a_run_is_trained_to_its_end_while_containers_are_killed(deployed: Deployment) -> None:
    run = trained(deployed)
    for version, service in ((1, "learner"), (2, "nats")):
        version_reached(deployed, run, version)
        deployed.kill(service)
    said, _ = run.communicate(timeout=400)
    assert run.returncode == 0, f"{said.decode()}\n{deployed.logs()}"
    assert b"step 4/4" in said
    assert deployed.container("learner")["RestartCount"] == 1
    assert deployed.container("nats")["RestartCount"] == 1
    ledger = deployed.openforge("ledger", RUN)
    lines, _ = ledger.communicate()
    assert ledger.returncode == 0, lines.decode()
    assert lines.decode().rstrip().endswith("closes")


def test_every_container_is_locked_in(deployed: Deployment) -> None:
    services = deployed.compose("ps", "-a", "--services").split()
    assert {"scheduler", "proxy", "engine", "learner", "gate", "sandbox-manager", "verifier", "nats"} <= set(services)
    for service in services:
        found = deployed.container(service)
        host = found["HostConfig"]
        assert host["ReadonlyRootfs"], service
        assert host["CapDrop"] == ["ALL"], service
        assert host["SecurityOpt"] == ["no-new-privileges:true"], service
        assert not host["Privileged"], service
        assert found["Config"]["User"] == ("0:0" if service == "setup" else "10001:10001"), service
        sockets = [mount["Destination"] for mount in found["Mounts"] if mount["Destination"].endswith("docker.sock")]
        assert bool(sockets) == (service == "gate"), service


def test_services_end_by_themselves_when_they_are_asked_to(deployed: Deployment) -> None:
    deployed.compose("stop")
    codes = {
        service: deployed.container(service)["State"]["ExitCode"]
        for service in ("scheduler", "proxy", "engine", "learner", "gate", "sandbox-manager", "verifier")
    }
    assert set(codes.values()) == {0}, codes
