"""Bounds on clients that ask for too much, are too many or too slow."""

import asyncio

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message as Event
from starlette.types import Receive, Scope, Send

from openforge.chat.contract import Message, Tool
from openforge.chat.dialect import BadRequest, Request
from openforge.proxy.bounds import MOST_MESSAGES, MOST_TOOLS, Bounded, check

SCOPE: Scope = {"type": "http", "path": "/ep/e-0.0/v1/chat/completions", "method": "POST", "headers": []}


def test_too_many_messages_or_tools_are_refused_with_their_number() -> None:
    user = Message(role="user", content="a")
    check(Request(model="m", messages=(user,) * MOST_MESSAGES, tools=(Tool(name="t"),) * MOST_TOOLS))
    with pytest.raises(BadRequest, match="has 10001 messages: send at most 10000"):
        check(Request(model="m", messages=(user,) * (MOST_MESSAGES + 1)))
    with pytest.raises(BadRequest, match="has 1001 tools"):
        check(Request(model="m", messages=(user,), tools=(Tool(name="t"),) * (MOST_TOOLS + 1)))


async def whole() -> Event:
    return {"type": "http.request", "body": b"", "more_body": False}


async def never() -> Event:
    await asyncio.Event().wait()
    raise AssertionError


async def test_more_requests_of_one_attempt_than_may_be_served_at_once_wait() -> None:
    at_work = 0
    most = 0
    go = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        await go.wait()
        at_work -= 1

    async def send(event: Event) -> None: ...

    bounded = Bounded(app, at_once=2, client_s=30.0)
    calls = [asyncio.create_task(bounded(SCOPE, whole, send)) for _ in range(5)]
    other = asyncio.create_task(bounded(SCOPE | {"path": "/ep/e-1.0/v1/models"}, whole, send))
    await asyncio.sleep(0.05)
    assert at_work == 3
    go.set()
    await asyncio.gather(*calls, other)
    assert (most, at_work, bounded._slots) == (3, 0, {})


async def test_a_client_that_takes_nothing_is_given_up() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("x" * 1000)(scope, receive, send)
        raise AssertionError("the answer was taken")

    async def send(event: Event) -> None:
        await asyncio.Event().wait()

    async with asyncio.timeout(20):
        await Bounded(app, at_once=1, client_s=0.05)(SCOPE, whole, send)


async def test_a_body_that_does_not_come_is_a_client_that_went_away() -> None:
    seen: list[Event] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(await receive())

    async def send(event: Event) -> None: ...

    async with asyncio.timeout(20):
        await Bounded(app, at_once=1, client_s=0.05)(SCOPE, never, send)
    assert seen == [{"type": "http.disconnect"}]
