"""The desks of all attempts at work.

Promises: a desk is loaded once however many calls want it; a call of an attempt that is over is refused and counted.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import NoReturn

from openforge.proxy.desk import Desk, ended
from openforge.service import log

_SEALED_KEPT = 100_000


class Desks:
    """The desks of all attempts at work, loaded when they are first needed.

    `shared`: other proxies work at the same attempts, so each call looks for what they told. `stragglers` counts
    calls of attempts that are sealed, or whose desk was never here.
    """

    def __init__(self, open_desk: Callable[[str, int], Desk], *, shared: bool = False) -> None:
        self.stragglers = 0
        self._open_desk = open_desk
        self._shared = shared
        self._desks: dict[tuple[str, int], asyncio.Task[Desk]] = {}
        self._sealed: OrderedDict[tuple[str, int], None] = OrderedDict()

    def refuse(self, episode: str, attempt: int) -> NoReturn:
        """The attempt's key opens nothing any more. Raises `Refusal`."""
        task = self._desks.get((episode, attempt))
        if task is not None and task.done() and not task.exception():
            task.result().refuse()
        self._turn_away(episode, attempt)

    async def open(self, episode: str, attempt: int) -> Desk:
        """The desk, for a caller; raises `Refusal` where everything is over."""
        if (episode, attempt) in self._sealed:
            self._turn_away(episode, attempt)
        desk = await self.of(episode, attempt)
        if self._shared:
            await desk.catch_up()
        return desk

    def _turn_away(self, episode: str, attempt: int) -> NoReturn:
        self.stragglers += 1
        if self.stragglers.bit_count() == 1:  # a harness that hammers on fills no log
            log.warning("call after the seal", episode=episode, attempt=attempt, so_far=self.stragglers)
        raise ended(f"{episode}.{attempt}")

    async def of(self, episode: str, attempt: int) -> Desk:
        key = (episode, attempt)
        if key not in self._desks:
            self._desks[key] = asyncio.create_task(self._open_desk(episode, attempt).load())
        task = self._desks[key]
        try:
            return await asyncio.shield(task)
        except BaseException:
            if task.done() and (task.cancelled() or task.exception()) and self._desks.get(key) is task:
                del self._desks[key]
            raise

    async def ended(self, episode: str, attempt: int) -> None:
        """Another proxy may seal this attempt: what is open here is called off and told."""
        if (episode, attempt) in self._desks:
            await (await self.of(episode, attempt)).end()

    def sealed(self, episode: str, attempt: int) -> None:
        """Nothing of it is needed any more. Its name is kept for a while: to look it up again costs a request."""
        self._desks.pop((episode, attempt), None)
        self._sealed[episode, attempt] = None
        if len(self._sealed) > _SEALED_KEPT:
            self._sealed.popitem(last=False)

    async def drain(self, timeout_s: float) -> None:
        desks = [task.result() for task in self._desks.values() if task.done() and not task.exception()]
        await asyncio.gather(*(desk.drained(timeout_s) for desk in desks))
