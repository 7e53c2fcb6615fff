"""The calls of `openforge.sandbox.docker.engine`, judged and passed on; everything else ends here.

Promises: what is refused never reaches the daemon, and says why; containers that no driver of ours made can be neither
seen nor touched.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from openforge.sandbox.docker.gate import rules
from openforge.service import log

_CALL_S = 1800.0  # as long as an image may take to come


class Gate:
    """`folders` may be shown to sandboxes, read-only; `runtimes` are those that may be asked for by name. `podman`:
    the daemon is one, so a sandbox's first process may be root until it has given its folders away.
    """

    def __init__(
        self, daemon: Path, folders: Sequence[Path], runtimes: Sequence[str] = (), *, podman: bool = False
    ) -> None:
        transport = httpx.AsyncHTTPTransport(uds=str(daemon))
        self._daemon = httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=_CALL_S)
        self._folders = folders
        self._runtimes = runtimes
        self._podman = podman

    def app(self) -> ASGIApp:
        """Only what is spelt plainly: a path that clients would tidy up could lead where no rule looked."""
        routes = self._routes()

        async def plainly(scope: Scope, receive: Receive, send: Send) -> None:
            plain = rules.plain(scope["path"])
            await (routes if plain else _answer(400, "the path is not spelt plainly"))(scope, receive, send)

        return plainly

    def _routes(self) -> Starlette:
        plain = [Route(path, self._pass, methods=["GET"]) for path in ("/info", "/version")]
        images = [
            Route("/images/{name:path}/json", self._pass, methods=["GET"]),
            Route("/images/create", self._pull, methods=["POST"]),
        ]
        containers = [
            Route("/containers/json", self._list, methods=["GET"]),
            Route("/containers/create", self._create, methods=["POST"]),
            Route("/containers/{name}/json", self._of_ours, methods=["GET"]),
            Route("/containers/{name}/start", self._start, methods=["POST"]),
            Route("/containers/{name}", self._of_ours, methods=["DELETE"]),
        ]
        return Starlette(routes=[*plain, *images, *containers])

    async def close(self) -> None:
        await self._daemon.aclose()

    async def _pass(self, request: Request, content: bytes = b"") -> Response:
        return await self._ask(request.method, request.url.path, request.query_params, content)

    async def _ask(
        self, method: str, path: str, params: Mapping[str, str] | None = None, content: bytes = b""
    ) -> Response:
        headers = {"Content-Type": "application/json"} if content else {}
        try:
            reply = await self._daemon.request(method, path, params=params, content=content, headers=headers)
        except httpx.HTTPError as error:
            return _answer(502, f"the Docker daemon does not answer: {error or type(error).__name__}")
        kind = reply.headers.get("Content-Type", "application/json")
        return Response(reply.content, status_code=reply.status_code, media_type=kind)

    async def _pull(self, request: Request) -> Response:
        """From a registry only: an import would bring a file system along."""
        if set(request.query_params) != {"fromImage"}:
            return _refused(request, "images may only be fetched by name")
        return await self._pass(request)

    async def _list(self, request: Request) -> Response:
        filters = _decoded(request.query_params.get("filters", "").encode())
        if not isinstance(filters, dict) or not rules.only_ours(filters):
            return _refused(request, "containers may only be listed by a driver's own label")
        return await self._pass(request)

    async def _create(self, request: Request) -> Response:
        body = _decoded(await request.body())
        if not isinstance(body, dict):
            return _refused(request, "it is no JSON object")
        if why := rules.why_not(body, self._folders, self._runtimes, podman=self._podman):
            return _refused(request, why)
        return await self._pass(request, msgspec.json.encode(body))  # what was read, not what was sent

    async def _start(self, request: Request) -> Response:
        """Whoever owns a folder may have put a link in its place since the container was made."""
        return await self._of_ours(request, lambda found: rules.why_not_start(found, self._folders))

    async def _of_ours(self, request: Request, why_not: Callable[[Mapping[str, Any]], str] = lambda _: "") -> Response:
        """Nothing is passed on of a container that the daemon cannot describe: its answer to that is the answer."""
        described = await self._ask("GET", f"/containers/{request.path_params['name']}/json")
        if described.status_code != 200:
            return described
        found = msgspec.json.decode(bytes(described.body))
        if not rules.ours(found["Config"]["Labels"]):
            return _refused(request, "this container was not made by a driver of ours")
        if why := why_not(found):
            return _refused(request, why)
        return await self._pass(request)


def _decoded(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return None


def _refused(request: Request, why: str) -> Response:
    log.warning("refused", call=f"{request.method} {request.url.path}", why=why)
    return _answer(403, f"the gate refuses {request.method} {request.url.path}: {why}")


def _answer(status: int, message: str) -> Response:
    """As the daemon says what is wrong."""
    return Response(msgspec.json.encode({"message": message}), status_code=status, media_type="application/json")
