"""Requests for sandboxes of another replica go there.

Promises: a client's connection has one connection of its own at each replica that it reaches through here, which
ends when the client's does: so the other replica knows as well as this one whether an answer arrived; a request
is passed on once, never in a circle.
"""

import asyncio
import re
from contextlib import suppress
from typing import Any

import httpx
import msgspec
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from openforge.sandbox_manager.api.boxes import Boxes
from openforge.sandbox_manager.api.connection import Connection
from openforge.sandbox_manager.api.registry import Registry, Replica

HOP = b"x-openforge-hop"
_SANDBOX = re.compile(r"/sandboxes/([A-Za-z0-9][A-Za-z0-9_-]{0,62})(/.*)?")
_JOB = re.compile(r"/jobs/[0-9a-f]{16}-([A-Za-z0-9_-]+)(/wait)?")
_OWN_HEADERS = (b"host", b"connection", b"content-length", b"transfer-encoding", b"keep-alive", b"upgrade")
_WS_HEADERS = (b"x-api-key", b"user-agent")
_FRAME_BYTES = 4 << 20
_LIST_S = 10.0


class Unreachable(Exception):
    """Another replica lives and did not answer."""


class Relay:
    """ASGI middleware around the routes of one replica."""

    def __init__(self, app: ASGIApp, boxes: Boxes, registry: Registry) -> None:
        self._app = app
        self._boxes = boxes
        self._registry = registry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        home = await self._home(scope)
        if home is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await _relay_websocket(home, scope, receive, send)
        else:
            await _relay_http(home, scope, receive, send)

    async def _home(self, scope: Scope) -> Replica | None:
        """Where it belongs, None for here."""
        if not self._registry.replica or scope["type"] not in ("http", "websocket"):
            return None
        if any(name == HOP for name, _ in scope["headers"]):
            return None
        path = scope["path"]
        if (matched := _SANDBOX.fullmatch(path)) and self._boxes.find(matched[1]) is None:
            return await self._registry.home_of(matched[1])
        if (matched := _JOB.fullmatch(path)) and matched[1] != self._registry.replica:
            named = await self._registry.replica_named(matched[1])
            return named if named and named.lives() else None
        if path == "/sandboxes" and scope.get("method") == "POST" and self._boxes.room <= 0:
            others = await self._registry.others()
            return others[0] if others and others[0].room > 0 else None
        return None


def _client_of(scope: Scope, home: Replica) -> tuple[httpx.AsyncClient, bool]:
    """(the client, whether it is for this request alone)."""
    connection: Connection | None = scope.get("openforge.connection")
    if connection is None or connection.closed_at is not None:
        return _new_client(), True
    if home.url not in connection.beyond:
        client = connection.beyond[home.url] = _new_client()
        connection.on_close.append(client.aclose)
    return connection.beyond[home.url], False


def _new_client() -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=None)
    return httpx.AsyncClient(timeout=httpx.Timeout(None, connect=5.0), limits=limits, verify=False, trust_env=False)


async def _relay_http(home: Replica, scope: Scope, receive: Receive, send: Send) -> None:
    client, alone = _client_of(scope, home)
    body, left = await _body(receive)
    if left:
        return
    query = scope["query_string"].decode("latin-1")
    url = home.url.rstrip("/") + scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
    headers = [(name, value) for name, value in scope["headers"] if name not in _OWN_HEADERS] + [(HOP, b"1")]
    asking = asyncio.ensure_future(client.request(scope["method"], url, headers=headers, content=body))
    leaving = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({asking, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            return
        await _answer(asking, home, scope, receive, send)
    finally:
        for task in (asking, leaving):
            task.cancel()
        await asyncio.wait({asking, leaving})
        if alone:
            await client.aclose()


async def _answer(
    asking: "asyncio.Future[httpx.Response]", home: Replica, scope: Scope, receive: Receive, send: Send
) -> None:
    try:
        reply = asking.result()
    except httpx.HTTPError as error:
        text = f"replica {home.name} cannot be reached: {error or type(error).__name__}"
        await JSONResponse({"detail": text}, 503, {"Retry-After": "5"})(scope, receive, send)
        return
    headers = [(name.lower(), value) for name, value in reply.headers.raw if name.lower() not in _OWN_HEADERS]
    headers.append((b"content-length", b"%d" % len(reply.content)))
    await send({"type": "http.response.start", "status": reply.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": reply.content})


async def sandboxes_beyond(registry: Registry, scope: Scope) -> list[Any]:
    """What the other replicas answer to the same `GET /sandboxes`; raises `Unreachable`."""
    found: list[Any] = []
    if any(name == HOP for name, _ in scope["headers"]):
        return found
    headers = [(name, value) for name, value in scope["headers"] if name in _WS_HEADERS] + [(HOP, b"1")]
    async with _new_client() as client:
        for other in await registry.others():
            url = f"{other.url.rstrip('/')}/sandboxes?{scope['query_string'].decode('latin-1')}"
            try:
                reply = await client.get(url, headers=headers, timeout=_LIST_S)
                found += reply.raise_for_status().json()["sandboxes"]
            except httpx.HTTPError as error:
                raise Unreachable(f"replica {other.name} cannot be reached: {error or type(error).__name__}") from error
    return found


async def _body(receive: Receive) -> tuple[bytes, bool]:
    """(all of it, whether the client left before its end)."""
    parts = []
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            return b"", True
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts), False


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _relay_websocket(home: Replica, scope: Scope, receive: Receive, send: Send) -> None:
    query = scope["query_string"].decode("latin-1")
    base = home.url.rstrip("/").replace("http", "ws", 1)
    url = base + scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
    headers = {
        name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"] if name in _WS_HEADERS
    }
    await receive()  # websocket.connect
    try:
        there = await connect(
            url,
            additional_headers={**headers, HOP.decode(): "1"},
            subprotocols=scope.get("subprotocols") or None,
            max_size=_FRAME_BYTES,
            proxy=None,
        )
    except InvalidStatus as refused:
        await _deny(send, refused.response.status_code, bytes(refused.response.body or b""))
        return
    except (OSError, WebSocketException, TimeoutError) as error:
        text = f"replica {home.name} cannot be reached: {error}"
        await _deny(send, 503, msgspec.json.encode({"detail": text}))
        return
    await send({"type": "websocket.accept"})
    try:
        await _carry(there, receive, send)
    finally:
        await there.close()


async def _deny(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "websocket.http.response.start", "status": status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})


async def _carry(there: Any, receive: Receive, send: Send) -> None:
    async def inward() -> None:
        while (message := await receive())["type"] == "websocket.receive":
            text = message.get("text")
            await there.send(text if text is not None else message.get("bytes") or b"")

    async def outward() -> None:
        async for frame in there:
            await send({"type": "websocket.send", "text" if isinstance(frame, str) else "bytes": frame})
        await send({"type": "websocket.close", "code": 1000})

    tasks = {asyncio.create_task(inward()), asyncio.create_task(outward())}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError, ConnectionClosed):
                await task
