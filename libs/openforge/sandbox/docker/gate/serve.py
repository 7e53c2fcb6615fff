"""The gate as a process: settings, listen, end on SIGTERM."""

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import uvicorn

from openforge.sandbox.docker.gate.app import Gate
from openforge.service import BAD_SETTINGS, BadSettings, health, listen_for_signals, log, set_up_logs, settings_from_env

_CLOSING_S = 5


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """`gate_socket` is where it listens, `gate_daemon` the socket of the Docker daemon. `gate_folders` are the folders
    below which a sandbox may be shown something, read-only; they are at the same paths on the daemon's host.
    `gate_runtimes` are OCI runtimes that may be asked for. `gate_podman`: the daemon is Podman, so a sandbox's first
    process may be root, with what it takes to give its folders away.
    """

    gate_socket: Path
    gate_folders: tuple[Path, ...]
    gate_daemon: Path = Path("/var/run/docker.sock")
    gate_runtimes: tuple[str, ...] = ()
    gate_podman: bool = False


def main() -> None:
    set_up_logs("gate")
    try:
        settings = settings_from_env(Settings)
    except BadSettings as error:
        log.error("bad settings", why=str(error))
        sys.exit(BAD_SETTINGS)
    health.begin("gate", os.environ.get("OPENFORGE_HEALTH_FILE", ""))
    asyncio.run(_serve(settings))


async def _serve(settings: Settings) -> None:
    stop = asyncio.Event()
    listen_for_signals(stop)
    gate = Gate(settings.gate_daemon, settings.gate_folders, settings.gate_runtimes, podman=settings.gate_podman)
    server = _Server(_config(gate))
    serving = asyncio.create_task(server.serve(sockets=[_listening(settings.gate_socket)]))
    writing = asyncio.create_task(health.keep_writing())
    stopping = asyncio.create_task(stop.wait())
    health.ready()
    log.info("listening", socket=str(settings.gate_socket), daemon=str(settings.gate_daemon))
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    for task in (writing, stopping):
        task.cancel()
    await serving
    await gate.close()


def _config(gate: Gate) -> uvicorn.Config:
    return uvicorn.Config(
        gate.app(), log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=_CLOSING_S
    )


def _listening(place: Path) -> socket.socket:
    """In place at once, for whoever is in our group."""
    draft = place.with_name(f".{place.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(draft))
    draft.chmod(0o660)
    draft.replace(place)
    listening.listen(64)
    return listening


class _Server(uvicorn.Server):
    """Signals are ours."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
