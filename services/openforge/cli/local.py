"""The six services of a run on this machine, as processes: their arguments, environment, files.

Promises: nothing listens but on loopback; ports are chosen once and kept over restarts; each service has its own
credentials on the run's bus.
"""

import os
import socket
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from openforge.cli.home import BusAddress, Home
from openforge.cli.supervise import Spec, service_argv
from openforge.runs import RunConfig
from openforge.sandbox.process.records import start_time

_VERL_PYTHON = Path(".venv-verl/bin/python")
_OF_WEIGHTS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
SERVICES = ("engine", "learner", "proxy", "verifier", "sandbox_manager", "scheduler")


def services_of(config: RunConfig) -> tuple[str, ...]:
    """Those that the run needs: nothing is learned from an endpoint."""
    return tuple(service for service in SERVICES if config.engine.kind != "endpoint" or service != "learner")


class Ports(msgspec.Struct, frozen=True, kw_only=True):
    nats: int
    engine: int
    proxy: int

    @classmethod
    def free(cls) -> "Ports":
        """Three ports that nobody listens on now."""
        with _bound() as nats, _bound() as engine, _bound() as proxy:
            return cls(nats=_port(nats), engine=_port(engine), proxy=_port(proxy))


def service_specs(config: RunConfig, home: Home, ports: Ports) -> Iterator[Spec]:
    """One process for each service, in the order in which they start."""
    keys = {"engine": config.engine.key_env, "verifier": config.judge.key_env}
    of_one = {*keys.values(), *_OF_WEIGHTS}
    common = {name: value for name, value in os.environ.items() if name not in of_one} | {
        "OPENFORGE_RUN": config.run.name,
        "OPENFORGE_NATS_URL": nats_url(ports),
        "OPENFORGE_NATS_CREDS": "",
        "OPENFORGE_HOME": str(home.root),
        "OPENFORGE_SOCKETS": str(home.sockets),
        "OPENFORGE_ENGINE_URL": address(ports).engine_url,
        "OPENFORGE_PROXY_URL": address(ports).proxy_url,
        "OPENFORGE_BLOBS": str(home.blobs),
        # Waiting threads must not spin: engine, learner and sandboxes share the cores.
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    threads = {"engine": config.engine.threads, "learner": config.learner.threads}
    for service in services_of(config):
        health = home.health / f"{service}.json"
        own = {
            "OPENFORGE_NATS_NKEY_SEED_FILE": str(home.credentials().seed(service)),
            "OPENFORGE_HEALTH_FILE": str(health),
            "OMP_NUM_THREADS": str(threads.get(service, 1)),
            **_held((keys.get(service, ""), *(_OF_WEIGHTS if service in ("engine", "learner") else ()))),
        }
        yield Spec(
            name=service,
            argv=service_argv(service, interpreter(service, config)),
            env=common | own,
            log=home.logs / f"{service}.log",
            health=health,
        )


def _held(names: Iterable[str]) -> dict[str, str]:
    """The key of somebody else's endpoint, or of a bucket, goes to the services that ask there and to no other."""
    return {name: os.environ[name] for name in names if name in os.environ}


def interpreter(service: str, config: RunConfig) -> str:
    """The Python that runs a service: a learner with verl's engines has one of its own, which `make verl` makes."""
    if service != "learner" or config.learner.backend != "verl":
        return sys.executable
    if named := os.environ.get("OPENFORGE_VERL_PYTHON"):
        return named
    return str(_VERL_PYTHON.absolute()) if _VERL_PYTHON.exists() else sys.executable


def nats_url(ports: Ports) -> str:
    return f"nats://127.0.0.1:{ports.nats}"


def address(ports: Ports) -> BusAddress:
    """Where this supervisor's run is reached."""
    return BusAddress(
        nats_url=nats_url(ports),
        pid=os.getpid(),
        started=start_time(os.getpid()),
        engine_url=f"http://127.0.0.1:{ports.engine}",
        proxy_url=f"http://127.0.0.1:{ports.proxy}",
    )


def _bound() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    return listener


def _port(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])
