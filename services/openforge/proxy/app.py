"""The HTTP side: routes, keys, bodies.

Promises: every request is answered in the shape of its dialect, whatever it holds.
"""

import re
import time

from starlette.types import ASGIApp, Receive, Scope, Send

from openforge.chat.dialect import BadRequest, Problem
from openforge.protos import AttemptKey
from openforge.proxy.asgi import Gone, Incoming, Whole, json_answer
from openforge.proxy.bounds import check
from openforge.proxy.calls import Refusal
from openforge.proxy.context import Context
from openforge.proxy.delivery import Delivery, refused, words
from openforge.proxy.desk import Desk
from openforge.proxy.desks import Desks
from openforge.proxy.hints import harness_of, says_retry
from openforge.proxy.keys import Keys
from openforge.proxy.routes import Count, Models, route_of, service_at, speaker_at
from openforge.service import log

_NAME = re.compile(r"([A-Za-z0-9_-]{1,128})\.(\d{1,9})")
_PLACE = re.compile(r"/ep/([^/]+)/(.*)", re.DOTALL)
_BASE = re.compile(r"/(ep/[^/]+)?")
_PROBES = ("", "api/hello")
_GONE = 499
"""What a client that went away would be told."""


class Door:
    """Who may come in, to which desk."""

    def __init__(self, context: Context, keys: Keys, desks: Desks) -> None:
        self._context = context
        self._keys = keys
        self._desks = desks

    async def open(self, name: str, request: Incoming) -> tuple[AttemptKey, Desk]:
        """The key that came with the request and the desk that it opens. Raises `Refusal`."""
        secret = _secret(request)
        key = await self._keys.look(secret) if secret else None
        if key is None:
            raise Refusal(Problem.UNKNOWN_KEY, "no valid model key: send the attempt's own key as a Bearer token")
        if name != f"{key.episode}.{key.attempt}":
            raise Refusal(Problem.UNKNOWN_KEY, "the key does not belong to the attempt in the URL")
        if key.ended or time.time() > key.expires_at:
            self._desks.refuse(key.episode, key.attempt)
        return key, await self._desks.open(key.episode, key.attempt)


def _secret(request: Incoming) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    named = (request.headers.get("x-api-key"), request.headers.get("x-goog-api-key"), request.asked("key"))
    return next((secret for secret in named if secret), "")


def make_app(context: Context, keys: Keys, desks: Desks) -> ASGIApp:
    door = Door(context, keys, desks)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        answer = await _answered(context, door, Incoming(scope, receive))
        await answer(receive, send)

    return app


async def _answered(context: Context, door: Door, request: Incoming) -> Whole | Delivery:
    place = _PLACE.fullmatch(request.path)
    if place is None:
        if request.method in ("GET", "HEAD") and _BASE.fullmatch(request.path):
            return Whole(200)
        dialect = speaker_at(route_of(request.path.removeprefix("/")))
        return refused(dialect, Problem.NOT_FOUND, f"there is nothing at {request.path}")
    name, route = place[1], route_of(place[2])
    dialect = speaker_at(route)
    try:
        return await _answer(context, door, name, route, request)
    except Refusal as refusal:
        return refused(dialect, refusal.problem, words(dialect, refusal))
    except BadRequest as error:
        return refused(dialect, Problem.BAD_REQUEST, str(error))
    except Gone:
        return Whole(_GONE)
    except Exception as error:  # the boundary: a bug costs one call and shows the harness nothing
        log.error("request died", error=error, path=request.path)
        return refused(dialect, Problem.ENGINE_FAILED, "the proxy failed; the call may be repeated")


async def _answer(context: Context, door: Door, name: str, route: str, request: Incoming) -> Whole | Delivery:
    if not _NAME.fullmatch(name):
        raise Refusal(Problem.NOT_FOUND, f"{name!r} is no attempt: the URL is /ep/<episode>.<attempt>/v1")
    if request.method == "HEAD" or (request.method == "GET" and route in _PROBES):
        return Whole(200)
    if request.headers.get("upgrade", "").lower() == "websocket":
        return Whole(426, b"this server speaks HTTP only: send the call as a POST", ((b"upgrade", b"HTTP/1.1"),))
    service = service_at(request.method, route)
    if service is None:
        raise Refusal(Problem.NOT_FOUND, f"{request.method} {request.path} is not served here")
    key, desk = await door.open(name, request)
    if isinstance(service, Models):
        return json_answer(service.listed([context.config.run.name]))
    dialect = service.dialect
    with desk.reading():
        body = await request.body(context.settings.proxy_body_mb << 20)
        asked = dialect.decode(body, f"{route}?{request.query}")
        check(asked)
    harness = harness_of(request.headers, asked.beside)
    await desk.read(asked)
    if isinstance(service, Count):
        return json_answer(service.counted(desk.count(asked, harness)))
    found = desk.take(key, asked, dialect.NAME, harness, says_retry(request.headers))
    return Delivery(dialect, asked, desk, found, context.settings.proxy_keep_alive_s)
