"""The HTTP side: routes, keys, bodies, answers in the form that was asked.

Promises: every request is answered in the shape of its dialect, whatever it holds; the terminal event or body is
written only when the turn is told; a harness that goes away is noticed at once.
"""

import asyncio
import re
import time

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openforge.chat.dialect import BadRequest, Dialect, Head, Problem, Stream
from openforge.chat.dialect import Request as Asked
from openforge.protos import AttemptKey
from openforge.proxy.bounds import check
from openforge.proxy.calls import Call, Overflow, Refusal
from openforge.proxy.context import Context
from openforge.proxy.core import Turn
from openforge.proxy.desk import Desk
from openforge.proxy.desks import Desks
from openforge.proxy.hints import harness_of, says_retry
from openforge.proxy.keys import Keys
from openforge.proxy.routes import Count, Models, route_of, service_at, speaker_at
from openforge.service import log

_NAME = re.compile(r"([A-Za-z0-9_-]{1,128})\.(\d{1,9})")
_PROBES = ("", "api/hello")
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


class Door:
    """Who may come in, to which desk."""

    def __init__(self, context: Context, keys: Keys, desks: Desks) -> None:
        self._context = context
        self._keys = keys
        self._desks = desks

    async def open(self, name: str, request: Request) -> tuple[AttemptKey, Desk]:
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


def _secret(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    named = (request.headers.get("x-api-key"), request.headers.get("x-goog-api-key"), request.query_params.get("key"))
    return next((secret for secret in named if secret), "")


def make_app(context: Context, keys: Keys, desks: Desks) -> ASGIApp:
    door = Door(context, keys, desks)

    async def attempt(request: Request) -> ASGIApp:
        name, route = request.path_params["name"], route_of(request.path_params["rest"])
        dialect = speaker_at(route)
        try:
            return await _answer(context, door, name, route, request)
        except Refusal as refusal:
            return _refused(dialect, refusal.problem, _words(dialect, refusal))
        except BadRequest as error:
            return _refused(dialect, Problem.BAD_REQUEST, str(error))
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:  # the boundary: a bug costs one call and shows the harness nothing
            log.error("request died", error=error, path=request.url.path)
            return _refused(dialect, Problem.ENGINE_FAILED, "the proxy failed; the call may be repeated")

    async def stub(request: Request) -> ASGIApp:
        return Response(status_code=200)

    async def elsewhere(request: Request) -> ASGIApp:
        dialect = speaker_at(route_of(request.path_params["rest"]))
        return _refused(dialect, Problem.NOT_FOUND, f"there is nothing at {request.url.path}")

    return Router(
        [
            Route("/ep/{name}/{rest:path}", attempt, methods=_METHODS),
            Route("/ep/{name}", stub, methods=["GET", "HEAD"]),
            Route("/", stub, methods=["GET", "HEAD"]),
            Route("/{rest:path}", elsewhere, methods=_METHODS),
        ]
    )


async def _answer(context: Context, door: Door, name: str, route: str, request: Request) -> ASGIApp:
    if not _NAME.fullmatch(name):
        raise Refusal(Problem.NOT_FOUND, f"{name!r} is no attempt: the URL is /ep/<episode>.<attempt>/v1")
    if request.method == "HEAD" or (request.method == "GET" and route in _PROBES):
        return Response(status_code=200)
    if request.headers.get("upgrade", "").lower() == "websocket":
        return Response("this server speaks HTTP only: send the call as a POST", 426, {"upgrade": "HTTP/1.1"})
    service = service_at(request.method, route)
    if service is None:
        raise Refusal(Problem.NOT_FOUND, f"{request.method} {request.url.path} is not served here")
    key, desk = await door.open(name, request)
    if isinstance(service, Models):
        return _json(service.listed([context.config.run.name]))
    dialect = service.dialect
    with desk.reading():
        body = await _body(request, context.settings.proxy_body_mb << 20)
        asked = dialect.decode(body, f"{route}?{request.url.query}")
        check(asked)
    headers = dict(reversed(request.headers.items()))  # the first of equal names counts
    harness = harness_of(headers, asked.beside)
    await desk.read(asked)
    if isinstance(service, Count):
        return _json(service.counted(desk.count(asked, harness)))
    found = desk.take(key, asked, dialect.NAME, harness, says_retry(headers))
    return _Delivery(dialect, asked, desk, found, context.settings.proxy_keep_alive_s)


async def _body(request: Request, most: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most:
        raise BadRequest(f"the body has {declared} bytes: at most {most} are read")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise BadRequest("the body is compressed: send it without Content-Encoding")
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > most:
            raise BadRequest(f"the body has more than {most} bytes: that is the most that is read")
        pieces.append(piece)
    return b"".join(pieces)


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status_code=status, media_type="application/json")


def _words(dialect: Dialect, refusal: Refusal) -> str:
    if isinstance(refusal, Overflow):
        return dialect.overflow(refusal.prompt_tokens, refusal.window)
    return str(refusal)


def _refused(dialect: Dialect, problem: Problem, message: str) -> Response:
    body = dialect.error(problem, message)
    headers = {"x-should-retry": _should_retry(problem)}
    return Response(body, problem.http_status, headers, media_type="application/json")


def _should_retry(problem: Problem) -> str:
    """Clients of both large vendors do as this header says; left to themselves they repeat a 409."""
    return "true" if problem.may_pass else "false"


class _Delivery:
    """Brings an answer to one harness, as a stream or whole."""

    def __init__(self, dialect: Dialect, asked: Asked, desk: Desk, found: Call | Turn, keep_alive_s: float) -> None:
        self._dialect = dialect
        self._desk = desk
        self._asked = asked
        self._found = found
        self._keep_alive_s = keep_alive_s
        self._head = Head(
            id=found.id if isinstance(found, Call) else found.request,
            created=int(time.time()),
            model=asked.model,
            prompt_tokens=found.order.placement.prompt_tokens if isinstance(found, Call) else found.prompt_tokens,
        )
        self._stream = dialect.stream(self._head, asked) if asked.stream else None
        self._open = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if isinstance(self._found, Turn):
            await self._end(self._found, send)
            self._found.received = True
            return
        with self._found.listening(stream=self._asked.stream):
            gone = asyncio.create_task(_gone(receive))
            delivering = asyncio.create_task(self._deliver(self._found, gone, send))
            try:
                await asyncio.wait({gone, delivering}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                gone.cancel()
                delivering.cancel()
            await asyncio.wait({gone, delivering})
        if not delivering.cancelled():
            delivering.result()

    async def _deliver(self, call: Call, gone: "asyncio.Task[None]", send: Send) -> None:
        """The answer has arrived, as far as a server can know, if its end was written and the client is still there."""
        try:
            if self._stream is not None:
                await self._show(call, self._stream, send)
            turn = await asyncio.shield(call.outcome)
        except Refusal as refusal:
            await self._problem(refusal, send)
            return
        await self._end(turn, send)
        turn.received = turn.received or not gone.done()

    async def _show(self, call: Call, stream: Stream, send: Send) -> None:
        """What is sampled, as it comes, and signs of life while nothing does."""
        thought = told = 0
        clock = asyncio.get_running_loop().time
        silent_since = clock()
        while not call.outcome.done():
            try:
                async with asyncio.timeout_at(silent_since + self._keep_alive_s):
                    reasoning, text = await call.more(thought, told)
            except TimeoutError:
                piece, silent_since = stream.keep_alive(), clock()
            else:
                thought, told = thought + len(reasoning), told + len(text)
                piece = (stream.reasoning(reasoning) if reasoning else b"") + (stream.text(text) if text else b"")
                call.shown = call.shown or bool(piece)
            if piece:
                await self._say(send, stream, piece)
                silent_since = clock()

    async def _end(self, turn: Turn, send: Send) -> None:
        """The terminal event or the body."""
        answer = self._desk.answer(turn, self._asked)
        if self._stream is None:
            await _send_json(send, 200, self._dialect.encode(self._head, self._asked, answer))
        else:
            await self._say(send, self._stream, self._stream.end(answer), more=False)

    async def _problem(self, refusal: Refusal, send: Send) -> None:
        words = _words(self._dialect, refusal)
        if self._stream is not None and self._open:
            await _write(send, self._stream.error(refusal.problem, words), more=False)
        else:
            body = self._dialect.error(refusal.problem, words)
            repeat = _should_retry(refusal.problem).encode()
            await _send_json(send, refusal.problem.http_status, body, (b"x-should-retry", repeat))

    async def _say(self, send: Send, stream: Stream, piece: bytes, *, more: bool = True) -> None:
        if not self._open:
            self._open = True
            kind = b"text/event-stream" if self._asked.events else b"application/json"
            headers = [(b"content-type", kind), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            piece = stream.start() + piece
        await _write(send, piece, more=more)


async def _gone(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


async def _write(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _send_json(send: Send, status: int, body: bytes, *more: tuple[bytes, bytes]) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await _write(send, body, more=False)
