"""What one attempt's clients may ask for, hold at once, and how slow they may be.

Promises: nobody is refused for being many, they wait unread; a client that neither sends nor takes for too long is as
good as gone, and what is kept for it is one piece of its answer.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openforge.chat.dialect import BadRequest, Request
from openforge.service import log

MOST_MESSAGES = 10_000
MOST_TOOLS = 1_000
MOST_IMAGES = 500


def check(request: Request) -> None:
    """Raises `BadRequest` where a request holds more than any harness has use for."""
    images = sum(len(message.images) for message in request.messages)
    for what, found, most in (
        ("messages", len(request.messages), MOST_MESSAGES),
        ("tools", len(request.tools), MOST_TOOLS),
        ("images", images, MOST_IMAGES),
    ):
        if found > most:
            raise BadRequest(f"the request has {found} {what}: send at most {most}")


class _Stalled(Exception):
    """The client takes nothing of what it is sent."""


class Bounded:
    """An app that serves at most `at_once` requests of each attempt at a time, and waits `client_s` for a client."""

    def __init__(self, app: ASGIApp, *, at_once: int, client_s: float) -> None:
        self._app = app
        self._at_once = at_once
        self._client_s = client_s
        self._slots: dict[str, _Slots] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with self._slot("/".join(scope["path"].split("/", 3)[:3])):
                await self._app(scope, _Incoming(receive, self._client_s), self._outgoing(send))
        except _Stalled:
            log.warning("a client took nothing of its answer", path=scope["path"], for_s=self._client_s)

    @asynccontextmanager
    async def _slot(self, attempt: str) -> AsyncIterator[None]:
        slots = self._slots.setdefault(attempt, _Slots(self._at_once))
        slots.users += 1
        try:
            async with slots.free:
                yield
        finally:
            slots.users -= 1
            if not slots.users:
                del self._slots[attempt]

    def _outgoing(self, send: Send) -> Send:
        async def patient(message: Message) -> None:
            try:
                async with asyncio.timeout(self._client_s):
                    await send(message)
            except TimeoutError:
                raise _Stalled from None

        return patient


class _Slots:
    def __init__(self, at_once: int) -> None:
        self.free = asyncio.Semaphore(at_once)
        self.users = 0


class _Incoming:
    """Receives; a body that does not come is taken for a client that went away."""

    def __init__(self, receive: Receive, client_s: float) -> None:
        self._receive = receive
        self._client_s = client_s
        self._whole = False

    async def __call__(self) -> Message:
        if self._whole:
            return await self._receive()
        try:
            async with asyncio.timeout(self._client_s):
                message = await self._receive()
        except TimeoutError:
            return {"type": "http.disconnect"}
        self._whole = not message.get("more_body", False)
        return message
