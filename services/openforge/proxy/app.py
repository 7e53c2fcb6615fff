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

from openforge.chat import chat_completions
from openforge.chat.dialect import Answer, BadRequest, Dialect, Head, Problem
from openforge.chat.dialect import Request as Asked
from openforge.protos import AttemptKey
from openforge.proxy.calls import Call, Refusal
from openforge.proxy.context import Context
from openforge.proxy.core import Turn
from openforge.proxy.desk import Desk, Desks
from openforge.proxy.hints import harness_of, says_retry
from openforge.proxy.keys import Keys
from openforge.service import log

_NAME = re.compile(r"([A-Za-z0-9_-]{1,128})\.(\d{1,9})")
_DIALECTS: dict[str, Dialect] = {"chat/completions": chat_completions}
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
    return request.headers.get("x-api-key") or request.headers.get("x-goog-api-key") or ""


def make_app(context: Context, keys: Keys, desks: Desks) -> ASGIApp:
    door = Door(context, keys, desks)

    async def attempt(request: Request) -> ASGIApp:
        name, route = request.path_params["name"], _route(request.path_params["rest"])
        dialect = _DIALECTS.get(route, chat_completions)
        try:
            return await _answer(context, door, dialect, name, route, request)
        except Refusal as refusal:
            return _refused(dialect, refusal.problem, str(refusal))
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
        return _refused(chat_completions, Problem.NOT_FOUND, f"there is nothing at {request.url.path}")

    return Router(
        [
            Route("/ep/{name}/{rest:path}", attempt, methods=_METHODS),
            Route("/ep/{name}", stub, methods=["GET", "HEAD"]),
            Route("/", stub, methods=["GET", "HEAD"]),
            Route("/{rest:path}", elsewhere, methods=_METHODS),
        ]
    )


def _route(rest: str) -> str:
    """What is asked for, however often a harness put `/v1` in front of it."""
    return re.sub(r"^(/*v1(?=/|$))+", "", rest).strip("/")


async def _answer(context: Context, door: Door, dialect: Dialect, name: str, route: str, request: Request) -> ASGIApp:
    if not _NAME.fullmatch(name):
        raise Refusal(Problem.NOT_FOUND, f"{name!r} is no attempt: the URL is /ep/<episode>.<attempt>/v1")
    match request.method, route:
        case "GET" | "HEAD", "" | "api/hello":
            return Response(status_code=200)
        case "GET" | "HEAD", "models":
            await door.open(name, request)
            return _json(chat_completions.models([context.config.run.name]))
        case "POST", _ if route in _DIALECTS:
            key, desk = await door.open(name, request)
            asked = dialect.decode(await _body(request, context.settings.proxy_body_mb << 20))
            found = desk.take(key, asked, dialect.NAME, harness_of(request.headers), says_retry(request.headers))
            return _Delivery(dialect, asked, found)
    raise Refusal(Problem.NOT_FOUND, f"{request.method} {request.url.path} is not served here")


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


def _refused(dialect: Dialect, problem: Problem, message: str) -> Response:
    return _json(dialect.error(problem, message), problem.http_status)


class _Delivery:
    """Brings an answer to one harness, as a stream or whole."""

    def __init__(self, dialect: Dialect, asked: Asked, found: Call | Turn) -> None:
        self._dialect = dialect
        self._asked = asked
        self._found = found
        self._head = Head(
            id=f"chatcmpl-{found.id if isinstance(found, Call) else found.request}",
            created=int(time.time()),
            model=asked.model,
            include_usage=asked.include_usage,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if isinstance(self._found, Turn):
            await self._end(self._found, 0, send)
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
        position = 0
        try:
            while self._asked.stream and (text := await call.more(position)):
                call.shown = True
                piece = self._dialect.stream_text(self._head, text)
                if position == 0:
                    await self._open_stream(send)
                    piece = self._dialect.stream_start(self._head) + piece
                position += len(text)
                await _write(send, piece)
            turn = await asyncio.shield(call.outcome)
        except Refusal as refusal:
            await self._problem(refusal, position > 0, send)
            return
        await self._end(turn, position, send)
        turn.received = turn.received or not gone.done()

    async def _end(self, turn: Turn, position: int, send: Send) -> None:
        """The terminal event or the body."""
        answer = Answer(
            message=turn.reply,
            finish=turn.finish,
            prompt_tokens=turn.prompt_tokens,
            completion_tokens=turn.sampled_tokens,
        )
        if not self._asked.stream:
            await _send_json(send, 200, self._dialect.encode(self._head, answer))
            return
        ending = self._dialect.stream_end(self._head, answer, position)
        if position == 0:
            await self._open_stream(send)
            ending = self._dialect.stream_start(self._head) + ending
        await _write(send, ending, more=False)

    async def _problem(self, refusal: Refusal, opened: bool, send: Send) -> None:
        if opened:
            await _write(send, self._dialect.stream_error(refusal.problem, str(refusal)), more=False)
        else:
            body = self._dialect.error(refusal.problem, str(refusal))
            await _send_json(send, refusal.problem.http_status, body)

    async def _open_stream(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _gone(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


async def _write(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _send_json(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await _write(send, body, more=False)
