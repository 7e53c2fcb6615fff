"""Whoever asks in `bench proxy`: a client that costs little, and how long answers take.

Promises: what is said is made up before the load begins, a request encoded before its clock starts; each answer is
read to its end; what is no 200 ends the measurement.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, cast

import httptools
import msgspec

from openforge.cli.bench._proxy_text import TURNS, Conversation

Ended = Callable[[str], Awaitable[None]]
"""Called with the name of each episode that has had its last turn."""


class BadAnswer(Exception):
    """Something else than an answer came."""


class Client(asyncio.Protocol):
    """One kept connection, one call at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._body: list[bytes] = []

    @classmethod
    async def to(cls, host: str, port: int) -> "Client":
        return (await asyncio.get_running_loop().create_connection(cls, host, port))[1]

    async def post(self, request: bytes) -> bytes:
        """The body of the answer to a request with its head."""
        self._body = []
        self._parser = httptools.HttpResponseParser(self)
        self._answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        assert self._transport is not None
        self._transport.write(request)
        await self._answered
        body = b"".join(self._body)
        if self._parser.get_status_code() != 200:
            raise BadAnswer(f"the answer was {self._parser.get_status_code()}: {body[:300]!r}")
        return body

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        with suppress(AttributeError, asyncio.InvalidStateError):
            self._answered.set_exception(BadAnswer(f"the connection broke: {exc}"))

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._answered.set_result(None)


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked: `path` and `headers` of a call of an episode; `{episode}` in them is its name."""

    host: str = "127.0.0.1"
    port: int
    path: str
    headers: Mapping[str, str] = {}
    stream: bool = False
    model: str = "m"

    def request(self, episode: str, body: bytes) -> bytes:
        lines = [f"POST {self.path} HTTP/1.1", f"Host: {self.host}:{self.port}", "Content-Type: application/json"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
        return head.replace("{episode}", episode).encode() + body


class Engine(msgspec.Struct, frozen=True):
    """The stub engine asked directly, in the form in which the target's proxy asks it."""

    port: int
    bodies: list[bytes]
    path: str

    def request(self, turn: int) -> bytes:
        body = self.bodies[turn]
        head = f"POST {self.path} HTTP/1.1\r\nHost: stub\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Spent(msgspec.Struct):
    """Milliseconds of calls: first turns of an episode, all others, and those that went directly."""

    first: list[float] = []
    later: list[float] = []
    direct_first: list[float] = []
    direct: list[float] = []
    wall_s: float = 0.0

    @property
    def calls(self) -> int:
        return len(self.first) + len(self.later)


async def talk(
    target: Target, episodes: list[tuple[str, Conversation]], spent: Spent, ended: Ended, engine: Engine | None
) -> None:
    """Episode after episode on one connection; with `engine`, each call is followed by the same one directly."""
    client = await Client.to(target.host, target.port)
    straight = await Client.to("127.0.0.1", engine.port) if engine else None
    try:
        for episode, conversation in episodes:
            for turn in range(TURNS):
                asked = {"model": target.model, "messages": conversation.messages, "stream": target.stream}
                took_ms, answer = await _timed(client, target.request(episode, msgspec.json.encode(asked)))
                (spent.later if turn else spent.first).append(took_ms)
                if straight and engine:
                    took_ms, _ = await _timed(straight, engine.request(turn))
                    (spent.direct if turn else spent.direct_first).append(took_ms)
                conversation.goes_on(_content(answer, target.stream))
            await ended(episode)
    finally:
        client.close()
        if straight:
            straight.close()


async def load(
    target: Target, name: str, concurrency: int, calls: int, ended: Ended, engine: Engine | None = None
) -> Spent:
    """`calls` calls, `concurrency` at once, each episode with its own conversation."""
    spent = Spent()
    each = max(1, calls // concurrency // TURNS)
    talks = [
        [(episode, Conversation(episode)) for episode in names(name, worker, each)] for worker in range(concurrency)
    ]
    begin = time.perf_counter()
    await asyncio.gather(*(talk(target, episodes, spent, ended, engine) for episodes in talks))
    spent.wall_s = time.perf_counter() - begin
    return spent


def names(name: str, worker: int, episodes: int) -> list[str]:
    return [f"{name}-{worker}-{number}" for number in range(episodes)]


async def _timed(client: Client, request: bytes) -> tuple[float, bytes]:
    begin = time.perf_counter()
    answer = await client.post(request)
    return (time.perf_counter() - begin) * 1e3, answer


def _content(body: bytes, stream: bool) -> str:
    if not stream:
        return str(msgspec.json.decode(body)["choices"][0]["message"]["content"])
    events: list[Any] = [msgspec.json.decode(event[6:]) for event in body.split(b"\n\n") if event[:7] == b"data: {"]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


def percentile(values: list[float], share: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[share - 1] if len(values) > 1 else values[0]
