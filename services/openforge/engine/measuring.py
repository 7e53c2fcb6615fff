"""How busy an engine is, read from its own `/metrics`, and told for who paces the work.

Promises: one fact every `measure_every_s` while there is anything to do, none otherwise; the moments in which weights
change, when every request waits, are not counted.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from statistics import fmean

import httpx
import msgspec

from openforge.bus import AlreadyTold, Bus
from openforge.engine.settings import Settings
from openforge.protos import EngineMeasured

LOOK_EVERY_S = 0.5
_LOOK_TIMEOUT_S = 5.0
_NUMBER = re.compile(r"^(vllm:\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class Load(msgspec.Struct, frozen=True):
    """One look: requests that run and wait, and the share of memory for keys and values that the running ones hold."""

    running: float
    waiting: float
    kv_use: float


def load_of(text: str) -> Load:
    """From vLLM's metrics; a server of several engines says each for itself."""
    numbers: dict[str, list[float]] = {}
    for name, value in _NUMBER.findall(text):
        numbers.setdefault(name, []).append(float(value))
    return Load(
        running=sum(numbers.get("vllm:num_requests_running", ())),
        waiting=sum(numbers.get("vllm:num_requests_waiting", ())),
        kv_use=max(numbers.get("vllm:kv_cache_usage_perc", ()), default=0.0),
    )


class Meter:
    def __init__(self, bus: Bus, settings: Settings, engine: str) -> None:
        self._bus = bus
        self._settings = settings
        self._engine = engine
        self._away = False

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """Weights change meanwhile."""
        self._away = True
        try:
            yield
        finally:
            self._away = False

    async def run(self) -> None:
        """Until it is cancelled."""
        async with httpx.AsyncClient(base_url=self._settings.engine_url, timeout=_LOOK_TIMEOUT_S) as http:
            while True:
                loads = [load async for load in self._looks(http)]
                if any(load.running + load.waiting for load in loads):
                    await self._tell(loads)

    async def _looks(self, http: httpx.AsyncClient) -> AsyncIterator[Load]:
        end = time.monotonic() + self._settings.measure_every_s
        while time.monotonic() < end:
            await asyncio.sleep(min(LOOK_EVERY_S, self._settings.measure_every_s))
            try:
                answer = await http.get("/metrics")
            except httpx.HTTPError:
                continue  # nothing listens yet, or a server is being started anew
            if answer.status_code == 200 and not self._away:
                yield load_of(answer.text)

    async def _tell(self, loads: list[Load]) -> None:
        measured = EngineMeasured(
            run=self._settings.run,
            engine=self._engine,
            at_s=int(time.time()),
            running=fmean(load.running for load in loads),
            waiting=fmean(load.waiting for load in loads),
            kv_use=fmean(load.kv_use for load in loads),
        )
        with suppress(AlreadyTold):  # this second was told by a process of the same name before
            await self._bus.tell(measured)
