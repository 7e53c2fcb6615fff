"""Consumers on the server, kept alive: made again whenever they are gone.

Promises: `ensure` after a break or a restart of the server gives the same consumer again.
"""

import asyncio
from typing import Any

from nats.js.errors import APIError

from openforge.bus.errors import BusError
from openforge.bus.inbox import Inbox
from openforge.bus.link import Link

EXPIRES_S = 30.0
HEARTBEAT_S = 5.0
SILENCE_S = 2.5 * HEARTBEAT_S
_NS = 1_000_000_000


class Consumer:
    """One pull consumer. `config` is the server's own shape, without names and filters."""

    def __init__(self, link: Link, stream: str, name: str, config: dict[str, Any]) -> None:
        self.link = link
        self.stream = stream
        self.name = name
        self.config = config
        self._made_at_epoch = -1
        self._making = asyncio.Lock()

    async def ensure(self) -> None:
        """Once for each connection, unless `forget` was called."""
        async with self._making:
            epoch = self.link.epoch
            if self._made_at_epoch != epoch:
                await self.make()
                self._made_at_epoch = epoch

    def forget(self) -> None:
        """The server says that there is no such consumer."""
        self._made_at_epoch = -1

    async def make(self) -> int:
        """How many messages wait in it."""
        try:
            info = await self.link.ask_api(
                f"CONSUMER.CREATE.{self.stream}.{self.name}",
                {"stream_name": self.stream, "config": {"name": self.name, **self.config}, "action": ""},
            )
        except APIError as error:
            raise BusError(f"consumer {self.name} on {self.stream} cannot be made: {error.description}") from error
        return int(info["num_pending"])

    async def pull(self, inbox: Inbox, batch: int, max_bytes: int = 0) -> str:
        """Ask for the next messages; they come to the inbox, and a status with the subject returned here ends them."""
        reply = inbox.fresh_reply()
        question: dict[str, Any] = {
            "batch": batch,
            "expires": int(EXPIRES_S * _NS),
            "idle_heartbeat": int(HEARTBEAT_S * _NS),
        }
        if max_bytes:
            question["max_bytes"] = max_bytes
        await self.link.tell_server(f"$JS.API.CONSUMER.MSG.NEXT.{self.stream}.{self.name}", question, reply)
        return reply

    async def delete(self) -> None:
        await self.link.ask_api(f"CONSUMER.DELETE.{self.stream}.{self.name}")
