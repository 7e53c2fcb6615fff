"""From the backend's weights to a location that engines can load.

Promises: a location is whole before it is given; a store that does not work is tried again until it does, one that
refuses ends the learner; what engines serve is kept.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TypeVar

from openforge.bus.link import Backoff
from openforge.learner.publisher import Publisher
from openforge.learner.thread import SlowThread
from openforge.protos import PolicyPublished, PolicyServed
from openforge.service import log
from openforge.weights import Written, folder_name
from openforge.weights.objects import StoreBroken
from openforge.weights.stores import Store

T = TypeVar("T")


class Outlet:
    def __init__(self, publisher: Publisher, store: Store, slow: SlowThread, keep: int) -> None:
        self._publisher = publisher
        self._store = store
        self._slow = slow
        self._keep = keep

    async def write(self, version: int, incarnation: int, parent: str) -> tuple[Written, str]:
        """What was written, and its location."""
        written = await self._slow.call(self._publisher.write, version, incarnation, parent)
        return written, await insisting(partial(self._store.publish, written.path, written.digest))

    async def holds(self, published: PolicyPublished) -> bool:
        """Whether what was published has the backend's weights, bit for bit, and engines can still have it."""
        if not await self._slow.call(self._publisher.holds, published):
            return False
        return await insisting(partial(self._store.has, published.location, published.digest))

    async def forget_old(self, served: Iterable[PolicyServed]) -> None:
        """All but the newest and what engines serve."""
        in_use = {folder_name(fact.version, fact.incarnation) for fact in served}
        await self._slow.call(self._publisher.forget_old, in_use)
        try:
            await self._store.forget_old(self._keep, in_use)
        except StoreBroken as error:
            log.warning("old weights stay until the next version", why=str(error))


async def insisting(ask: Callable[[], Awaitable[T]]) -> T:
    """What a store answers, asked until it does. Raises `StoreRefused`."""
    backoff = Backoff(first_s=0.5, last_s=30.0)
    while True:
        try:
            return await ask()
        except StoreBroken as error:
            log.warning("the store of weights does not work, trying again", why=str(error))
            await backoff.pause()
