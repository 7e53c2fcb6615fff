"""Which run is over: a fold of the run's own facts, and a signal for whoever is at work."""

import asyncio

from openforge.bus import Bus, CaughtUp, Cursors
from openforge.runs import RunState


class RunWatch:
    """`caught_up` is set when everything told before the start is known."""

    def __init__(self, bus: Bus, run: str) -> None:
        self._bus = bus
        self._run = run
        self._state = RunState()
        self._over = asyncio.Event()
        self.caught_up = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    async def until_over(self) -> None:
        await self._over.wait()

    async def follow(self) -> None:
        async for told in self._bus.follow(("run",), run=self._run, cursors=Cursors()):
            if isinstance(told, CaughtUp):
                self.caught_up.set()
                continue
            self._state = self._state.after(told.fact)
            if self._state.phase == "stopped":
                self._over.set()
            else:
                self._over.clear()
