"""Pods of rendered manifests as processes of this machine, each with its own address, files and credentials.

What a kubelet would do, as far as processes have it: the command and the environment of the manifest, volumes at their
paths below a root of the pod's own, probes, restarts. Each pod has an address of the loopback network, and names of
services become addresses. What is not there: images, users, limits, network policies. Sandboxes are those of driver
`process`, since there is no API server.
"""

import asyncio
import base64
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from manifests import (
    Object,
    container_of,
    environment_of,
    labels_of,
    name_of,
    of_kind,
    pod_of,
    replicas_of,
    secrets_of,
)

from openforge.bus import BusSettings
from openforge.bus.server import find_binary, free_port
from openforge.cli.supervise import GaveUp, Spec, Supervised, Supervisor

_PERMANENT = ("StatefulSet", "Deployment", "Job")
_KEPT = ("PATH", "LANG", "PYTHONPATH", "OMP_NUM_THREADS", "OPENFORGE_REQUIRE_SANDBOXES")


class Pod:
    """One pod of a workload: its address, its root, and where what its manifest names lies."""

    def __init__(self, workload: Object, index: int, ip: str, folder: Path) -> None:
        self.workload = workload
        self.app = labels_of(workload)["app.kubernetes.io/name"]
        self.name = f"{name_of(workload)}-{index}"
        self.ip = ip
        self.root = folder / "pods" / self.name
        self._folder = folder
        paths = sorted((mount["mountPath"] for mount in container_of(workload)["volumeMounts"]), key=len, reverse=True)
        self._paths = re.compile(rf"(?<![\w./-])({'|'.join(map(re.escape, paths))})(?=/|\"|$)")

    def translate(self, text: str, hosts: Mapping[str, str]) -> str:
        """Paths of its volumes, names of services and its own address, as they are here."""
        text = self._paths.sub(lambda found: f"{self.root}{found[1]}", text)
        for name in sorted(hosts, key=len, reverse=True):
            text = re.sub(rf"(?:(?<=//)|(?<==)){re.escape(name)}(?=[:/\"]|$)", hosts[name], text)
        return text.replace("0.0.0.0", self.ip)

    def make_volumes(self, objects: tuple[Object, ...], hosts: Mapping[str, str]) -> None:
        volumes = {volume["name"]: volume for volume in pod_of(self.workload)["volumes"]}
        for mount in container_of(self.workload)["volumeMounts"]:
            place = Path(f"{self.root}{mount['mountPath']}")
            place.parent.mkdir(parents=True, exist_ok=True)
            volume = volumes.get(mount["name"], {})
            if "configMap" in volume:
                place.mkdir()
                self._write_config(place, objects, volume["configMap"]["name"], hosts)
            else:
                place.symlink_to(self._source(mount["name"], volume), target_is_directory=True)

    def _write_config(self, place: Path, objects: tuple[Object, ...], name: str, hosts: Mapping[str, str]) -> None:
        (found,) = (found for found in of_kind(objects, "ConfigMap") if name_of(found) == name)
        for file, text in found["data"].items():
            (place / file).write_text(self.translate(text, hosts))

    def _source(self, name: str, volume: Object) -> Path:
        if "secret" in volume:
            return self._folder / "secrets" / str(volume["secret"]["secretName"])
        if "persistentVolumeClaim" in volume:
            claim = self._folder / "claims" / str(volume["persistentVolumeClaim"]["claimName"])
        elif "emptyDir" in volume:
            claim = self._folder / "scratch" / self.name / name
        else:
            claim = self._folder / "claims" / f"{name}-{self.name}"
        claim.mkdir(parents=True, exist_ok=True)
        return claim

    def spec(self, objects: tuple[Object, ...], hosts: Mapping[str, str], more: Mapping[str, str]) -> Spec:
        fields = {"metadata.name": self.name, "status.podIP": self.ip}
        env = environment_of(self.workload, objects, fields, {"PROXY_SERVICE_HOST": hosts["proxy"]})
        env = {name: self.translate(value, hosts) for name, value in env.items()}
        command = [_with(env, self.translate(part, hosts)) for part in container_of(self.workload)["command"]]
        health = env.get("OPENFORGE_HEALTH_FILE")
        return Spec(
            name=self.name,
            argv=[_program(command[0]), *command[1:]],
            env={name: os.environ[name] for name in _KEPT if name in os.environ} | env | more,
            log=self._folder / f"{self.name}.log",
            health=Path(health) if health else None,
        )


def _with(env: Mapping[str, str], part: str) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], part)


def _program(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    return find_binary() if name == "nats-server" else str(beside) if beside.exists() else str(shutil.which(name))


class Cluster:
    """The pods of these objects. `sockets` is short, as UNIX sockets' paths have to be."""

    def __init__(
        self, folder: Path, objects: tuple[Object, ...], run: str, sockets: Path, only: Collection[str] = ()
    ) -> None:
        self.folder = folder
        self.objects = objects
        self._prefix = f"127.{random.randrange(1, 255)}.{random.randrange(255)}"
        self.pods = list(self._made())
        self.hosts = self._hosts()
        self._keep_secrets(run)
        for pod in self.pods:
            pod.make_volumes(self.objects, self.hosts)
        self.keeping: asyncio.Task[None] | None = None
        self._sandboxes = {"OPENFORGE_SANDBOX_DRIVER": "process", "OPENFORGE_SOCKETS": str(sockets)}
        kept = (pod for pod in self.pods if pod.app in only or (not only and not _ends(pod)))
        self.kept = [pod.name for pod in kept]
        self.supervisor = Supervisor([self._spec(pod) for pod in self.pods if pod.name in self.kept])

    def _made(self) -> Iterator[Pod]:
        numbers = iter(range(1, 255))
        for workload in of_kind(self.objects, *_PERMANENT):
            for index in range(replicas_of(workload)):
                yield Pod(workload, index, f"{self._prefix}.{next(numbers)}", self.folder)

    def _hosts(self) -> dict[str, str]:
        """A service's name leads to its first pod, `POD.SERVICE` to that pod; a learner's ranks meet at a free port."""
        hosts: dict[str, str] = {}
        for service in of_kind(self.objects, "Service"):
            chosen = [
                pod for pod in self.pods if service["spec"]["selector"].items() <= labels_of(pod.workload).items()
            ]
            hosts[name_of(service)] = chosen[0].ip
            hosts |= {f"{pod.name}.{name_of(service)}": pod.ip for pod in chosen}
        hosts["learner-0.learner:29400"] = f"{hosts['learner-0.learner']}:{free_port()}"
        return hosts

    def _keep_secrets(self, run: str) -> None:
        addresses = [f"IP:{pod.ip}" for pod in self.pods if pod.app == "nats"]
        for secret in secrets_of(self.folder / "keys", run, *addresses):
            place = self.folder / "secrets" / name_of(secret)
            place.mkdir(parents=True)
            for file, data in secret["data"].items():
                (place / file).touch(mode=0o600)
                (place / file).write_bytes(base64.b64decode(data))

    def _spec(self, pod: Pod) -> Spec:
        # a container dies as a whole; processes here have to be told so
        more = self._sandboxes if _makes_sandboxes(pod) else {}
        return pod.spec(self.objects, self.hosts, more)

    # -- what tests look at

    def claim(self, name: str) -> Path:
        return self.folder / "claims" / name

    def environment(self, app: str) -> Mapping[str, str]:
        """Of the first pod of this name."""
        return self._spec(self.named(app)).env

    def operator(self) -> BusSettings:
        return BusSettings.from_env(self.environment("bus-set-up"))

    async def client(self, *arguments: str) -> asyncio.subprocess.Process:
        """`openforge ...` beside the cluster, as its operator; what it says goes to `client.log`."""
        env = dict(self.environment("bus-set-up")) | {"OPENFORGE_RUNS": str(self.folder / "runs")}
        with (self.folder / "client.log").open("ab") as log:
            argv = (sys.executable, "-m", "openforge.cli", *arguments)
            return await asyncio.create_subprocess_exec(
                *argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def named(self, app: str) -> Pod:
        return next(pod for pod in self.pods if pod.app == app)

    def process(self, pod: str) -> Supervised:
        return self.supervisor[pod]

    async def kill(self, pod: str) -> None:
        """SIGKILL to all of it, as when a node is lost; it is started again. Waits for it to run first."""
        process = self.supervisor[pod]
        while process.process is None or process.process.returncode is not None:
            await asyncio.sleep(0.05)
        with suppress(ProcessLookupError):
            os.killpg(process.process.pid, signal.SIGKILL)

    def still_kept(self) -> None:
        """Raises `GaveUp` where a pod cannot be kept running."""
        if self.keeping is not None and self.keeping.done():
            self.keeping.result()

    async def complete(self, app: str, within_s: float) -> None:
        """Run a Job's pod until it succeeds."""
        spec = self._spec(self.named(app))
        async with asyncio.timeout(within_s):
            while True:
                self.still_kept()
                with spec.log.open("ab") as log:
                    job = await asyncio.create_subprocess_exec(*spec.argv, env=dict(spec.env), stdout=log, stderr=log)
                try:
                    if await job.wait() == 0:
                        return
                finally:
                    if job.returncode is None:
                        job.kill()
                        await job.wait()
                await asyncio.sleep(1.0)

    def last_words(self) -> str:
        return "\n".join(
            f"-- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-8:])
            for log in sorted(self.folder.glob("*.log"))
        )


def _ends(pod: Pod) -> bool:
    return "ttlSecondsAfterFinished" in pod.workload["spec"]


def _makes_sandboxes(pod: Pod) -> bool:
    return pod.app in ("sandbox-manager", "verifier", "proxy")


@asynccontextmanager
async def cluster(
    folder: Path, objects: tuple[Object, ...], run: str, only: Collection[str] = ()
) -> AsyncIterator[Cluster]:
    """The pods of these objects, all or `only` some, kept running for the time of the block."""
    sockets = Path(tempfile.mkdtemp(prefix="of-"))
    sockets.chmod(0o755)
    made = Cluster(folder, objects, run, sockets, only)
    made.keeping = asyncio.create_task(made.supervisor.run())
    try:
        yield made
    finally:
        await made.supervisor.stop()
        with suppress(GaveUp):
            await made.keeping
        shutil.rmtree(sockets, ignore_errors=True)
