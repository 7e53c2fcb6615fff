"""The ways out of a sandbox: which of its loopback ports lead where, by its network mode."""

import socket
from collections.abc import Sequence
from pathlib import Path

from openforge.sandbox.contract import SandboxLost, SandboxSpec
from openforge.sandbox.egress import EGRESS_PORT, Egress, Rules, proxy_env
from openforge.sandbox.process.forward import Forwarder

WayOut = Forwarder | Egress


def ports_of(spec: SandboxSpec, proxy_socket: Path | None) -> list[int]:
    """What listens inside for us: the model proxy's port, and the world's."""
    to_proxy = [spec.proxy_port] if spec.network != "none" and proxy_socket else []
    to_world = [EGRESS_PORT] if spec.network in ("allowlist", "open") else []
    return to_proxy + to_world


def way_to_world(spec: SandboxSpec) -> dict[str, str]:
    """What the environment must say of the second."""
    return proxy_env() if spec.network in ("allowlist", "open") else {}


async def open_ways_out(spec: SandboxSpec, fds: Sequence[int], proxy_socket: Path | None) -> list[WayOut]:
    """The listening sockets that the init handed out, each to where its port leads."""
    sockets = [socket.socket(fileno=fd) for fd in fds]
    ports = ports_of(spec, proxy_socket)
    if len(sockets) != len(ports):
        raise SandboxLost(f"the sandbox opened {len(sockets)} ports instead of {len(ports)}")
    ways: list[WayOut] = []
    for port, listening in zip(ports, sockets, strict=True):
        way = _way_out(spec, port, proxy_socket)
        await way.start(listening)
        ways.append(way)
    return ways


def _way_out(spec: SandboxSpec, port: int, proxy_socket: Path | None) -> WayOut:
    if port == EGRESS_PORT or proxy_socket is None:
        return Egress(Rules(spec.network, spec.hosts))
    return Forwarder(proxy_socket)
