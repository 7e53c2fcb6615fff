"""The few calls of the Docker Engine API that the driver needs, over its UNIX socket. Podman answers the same ones.

Promises: whatever the daemon answers or fails to answer becomes `EngineError` with its own words.
Reference: Docker Engine API, version 1.41 (Podman 4 speaks it); paths carry no version, so that the daemon's own is
spoken.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

_CALL_S, _PULL_S = 60.0, 1800.0
_PLACES = ("/var/run/docker.sock", "/run/podman/podman.sock")


class EngineError(Exception):
    """`status` is that of HTTP, 0 where the daemon did not answer at all."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def find_socket() -> Path:
    """`DOCKER_HOST` where it names a socket, else the first usual place that has one."""
    named = os.environ.get("DOCKER_HOST", "")
    if named.startswith("unix://"):
        return Path(named.removeprefix("unix://"))
    return next((Path(place) for place in _PLACES if Path(place).exists()), Path(_PLACES[0]))


class Engine:
    def __init__(self, socket: Path) -> None:
        self.socket = socket
        transport = httpx.AsyncHTTPTransport(uds=str(socket), limits=httpx.Limits(max_connections=64))
        self._client = httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=_CALL_S)

    async def close(self) -> None:
        await self._client.aclose()

    async def info(self) -> dict[str, Any]:
        return dict(await self._call("GET", "/info"))

    async def is_podman(self) -> bool:
        components = (await self._call("GET", "/version")).get("Components") or []
        return any("podman" in str(part.get("Name")).lower() for part in components)

    async def image(self, name: str) -> dict[str, Any]:
        return dict(await self._call("GET", f"/images/{name}/json"))

    async def pull(self, name: str) -> None:
        """Errors come within the stream of progress, after a status that says all is well."""
        tagged = name if ":" in name.rpartition("/")[2] or "@" in name else f"{name}:latest"
        told = await self._send("POST", "/images/create", params={"fromImage": tagged}, timeout=_PULL_S)
        for line in told.content.splitlines():
            if line.strip() and (failure := msgspec.json.decode(line).get("error")):
                raise EngineError(404, str(failure))

    async def create(self, name: str, body: Mapping[str, Any]) -> str:
        made = await self._call("POST", "/containers/create", params={"name": name}, json=body)
        return str(made["Id"])

    async def start(self, container: str) -> None:
        await self._call("POST", f"/containers/{container}/start")

    async def inspect(self, container: str) -> dict[str, Any]:
        return dict(await self._call("GET", f"/containers/{container}/json"))

    async def remove(self, container: str) -> None:
        """Kill it, and remove it with its volumes."""
        await self._call("DELETE", f"/containers/{container}", params={"force": "true", "v": "true"})

    async def list(self, labels: Sequence[str]) -> list[dict[str, Any]]:
        """Containers in any state that have all these labels (`key=value`)."""
        filters = msgspec.json.encode({"label": list(labels)}).decode()
        return list(await self._call("GET", "/containers/json", params={"all": "true", "filters": filters}) or [])

    async def _call(self, method: str, path: str, **more: Any) -> Any:
        content = (await self._send(method, path, **more)).content
        return msgspec.json.decode(content) if content.strip() else None

    async def _send(self, method: str, path: str, **more: Any) -> httpx.Response:
        try:
            reply = await self._client.request(method, path, **more)
        except httpx.HTTPError as error:
            raise EngineError(0, f"{self.socket}: {error or type(error).__name__}") from error
        if reply.status_code >= 400:
            raise EngineError(reply.status_code, _said(reply))
        return reply


def _said(reply: httpx.Response) -> str:
    try:
        told = msgspec.json.decode(reply.content)
    except msgspec.DecodeError:
        return reply.text.strip() or f"status {reply.status_code}"
    return str(told.get("message") or told.get("cause") or told)
