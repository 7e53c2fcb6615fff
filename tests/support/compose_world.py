"""The deployment of deploy/compose on a real dockerd of the test's own: images, secrets, volumes and all.

Nothing is fetched: the images are built on one that is made from this host. What is left behind, by whomever, is found
by `leftovers`.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from container_daemons import Daemons, cannot, import_image
from host_image import ENV, ROOT, image_tree

from openforge.bus.server import find_binary, free_port

BASE = "localhost/openforge-base:latest"
_EXTRAS = (
    *("proxy", "engine", "learner", "sandbox_manager", "verifier", "scheduler", "cli", "harnesses"),
    "seeing",
    "s3",
)
_PROGRAMS = (
    "base64", "basename", "bash", "cat", "chmod", "chown", "cp", "cut", "date", "dd", "echo", "env", "find", "grep",
    "head", "id", "ls", "mkdir", "mv", "printf", "readlink", "rm", "sed", "sh", "sleep", "sort", "tail", "tar", "test",
    "touch", "tr", "true", "uname", "wc", "wget", "xargs",
)  # fmt: skip
_OWNER = 10001


class Deployment:
    """`compose` runs `docker compose`, `openforge` the command line of this host against the deployment's bus."""

    def __init__(self, folder: Path, socket: Path, run: str) -> None:
        self.folder = folder
        self.run = run
        self.url = f"nats://127.0.0.1:{free_port()}"
        self._env = dict(os.environ) | {"DOCKER_HOST": f"unix://{socket}", "DOCKER_BUILDKIT": "0"}
        settings = {
            "OPENFORGE_RUN": run,
            "OPENFORGE_MODEL": "tiny",
            "COMPOSE_PROFILES": "cpu",
            "OPENFORGE_UID": _OWNER,
            "OPENFORGE_GID": _OWNER,
            "DOCKER_GID": socket.stat().st_gid,
            "DOCKER_SOCKET": socket,
            "OPENFORGE_DATA": folder / "data",
            "OPENFORGE_SECRETS": folder / "secrets",
            "NATS_IMAGE": BASE,
            "NATS_LISTEN": self.url.removeprefix("nats://"),
            "BASE_IMAGE": BASE,
        }
        (folder / "env").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        (folder / "config.json").write_text("{}")
        self._env["DOCKER_CONFIG"] = str(folder)  # nobody's credentials or plug-ins

    def make_base(self, socket: Path) -> None:
        programs = [Path(found) for name in _PROGRAMS if (found := shutil.which(name, path="/usr/bin:/bin:/usr/sbin"))]
        tree = image_tree(programs, _EXTRAS, {"usr/local/bin/nats-server": Path(find_binary())})
        import_image(socket, BASE, tree, ENV)

    def build(self) -> None:
        """Every image as the file says, on the base that was made here."""
        for service in json.loads(self.compose("config", "--format", "json"))["services"].values():
            if (build := service.get("build")) is not None:
                arguments = [f"--build-arg={name}={value}" for name, value in build["args"].items()]
                file = Path(build["context"]) / build["dockerfile"]
                self.docker(
                    *("build", "--network=none", "-q", "-f", str(file), "-t", service["image"]),
                    *(*arguments, build["context"]),
                )

    def compose(self, *arguments: str) -> str:
        file = ROOT / "deploy" / "compose" / "compose.yaml"
        return self._ran("docker-compose", "--env-file", str(self.folder / "env"), "-f", str(file), *arguments)

    def docker(self, *arguments: str) -> str:
        return self._ran("docker", *arguments)

    def openforge(self, *arguments: str) -> "subprocess.Popen[bytes]":
        """As its operator, who finds the seed among the secrets."""
        own = {
            "OPENFORGE_NATS_URL": self.url,
            "OPENFORGE_NATS_NKEY_SEED_FILE": str(self.folder / "secrets" / "operator" / "seed"),
            "OPENFORGE_RUNS": str(self.folder / "runs"),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        return subprocess.Popen(
            [sys.executable, "-m", "openforge.cli", *arguments],
            env=self._env | own,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def container(self, service: str) -> dict[str, Any]:
        name = self.compose("ps", "-aq", service).strip()
        found: list[dict[str, Any]] = json.loads(self.docker("inspect", name))
        return found[0]

    def kill(self, service: str) -> None:
        """SIGKILL from outside, as a kernel does that is out of memory: the daemon was not asked."""
        os.kill(self.container(service)["State"]["Pid"], signal.SIGKILL)

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--tail", "40")

    def leftovers(self) -> list[str]:
        """Containers, volumes and networks that are still there."""
        kinds = (("ps", "-aq"), ("volume", "ls", "-q"), ("network", "ls", "-q", "--filter=type=custom"))
        return [name for kind in kinds for name in self.docker(*kind).split()]

    def _ran(self, *line: str) -> str:
        done = subprocess.run(line, env=self._env, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(line)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done.stdout


@contextmanager
def deployment(run: str) -> Iterator[Deployment]:
    """Built and up for the time of the block; then nothing of it is left."""
    for program in ("docker", "docker-compose"):
        if shutil.which(program) is None:
            cannot(f"{program} is not installed: `make test-compose` installs it as root on Debian")
    folder = Path(tempfile.mkdtemp(prefix="ofc-", dir="/tmp"))  # paths of sockets must be short
    folder.chmod(0o755)  # sandboxes are shown folders below
    daemons = Daemons(with_image=False, in_memory=True)
    try:
        socket = daemons.socket("docker")
        made = Deployment(folder, socket, run)
        made.make_base(socket)
        made.build()
        try:
            made.compose("up", "--detach", "--wait", "--no-build", "--wait-timeout", "300")
            yield made
        finally:
            made.compose("down", "--volumes", "--remove-orphans", "--timeout", "60")
    finally:
        daemons.stop()
        shutil.rmtree(folder, ignore_errors=True)
