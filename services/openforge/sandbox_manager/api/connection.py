"""Whether an answer arrived: what can be known of it from the connection that it went out on.

Clients that keep their connections (Orchard's do) close one only when something on it failed. So: a connection
that closes before the answer was written did not carry it; one that closes after it, without another request,
probably did not either; one that goes on did.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class Connection:
    """One connection of a client. `requests` counts those begun on it; `beyond` are connections made for it alone."""

    def __init__(self) -> None:
        self.requests = 0
        self.closed_at: float | None = None
        self.closed_by_us = False
        self.beyond: dict[str, httpx.AsyncClient] = {}
        self.on_close: list[Callable[[], Coroutine[Any, Any, None]]] = []

    def closed(self) -> None:
        self.closed_at = time.monotonic()
        for end in self.on_close:
            ending = asyncio.ensure_future(end())
            _ending.add(ending)
            ending.add_done_callback(_ending.discard)


_ending: set["asyncio.Future[None]"] = set()


async def all_closed() -> None:
    """Wait for the ends of connections beyond, as far as clients have left."""
    await asyncio.sleep(0)
    if _ending:
        await asyncio.wait(_ending)


class Delivery:
    """The answer to one request."""

    def __init__(self, connection: Connection | None) -> None:
        self._connection = connection
        self._request = connection.requests if connection else 0
        self._written_at: float | None = None

    def written(self) -> None:
        self._written_at = time.monotonic()

    @property
    def certainly_lost(self) -> bool:
        closed_at = self._connection.closed_at if self._connection else None
        return closed_at is not None and (self._written_at is None or closed_at < self._written_at)

    def probably_lost_within(self, seconds: float) -> bool:
        """The client closed the connection after the answer, that long ago at most, and used it for nothing else."""
        connection = self._connection
        if connection is None or connection.closed_at is None or connection.closed_by_us:
            return False
        return connection.requests == self._request and time.monotonic() - connection.closed_at <= seconds


class Watched(HttpToolsProtocol):
    """Uvicorn's protocol; a request finds its connection in `scope["openforge.connection"]`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._watched = Connection()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._watched.requests += 1
        self.scope["openforge.connection"] = self._watched  # type: ignore[typeddict-unknown-key]

    def handle_websocket_upgrade(self) -> None:
        self._watched.closed_by_us = True  # it goes on, but no longer with requests
        self._watched.closed()
        super().handle_websocket_upgrade()

    def timeout_keep_alive_handler(self) -> None:
        self._watched.closed_by_us = True
        super().timeout_keep_alive_handler()

    def shutdown(self) -> None:
        self._watched.closed_by_us = True
        super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._watched.closed()
        super().connection_lost(exc)
