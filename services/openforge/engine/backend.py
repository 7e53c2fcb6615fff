"""What serves the weights: our own engine in this process, or a vLLM server that it drives."""

import asyncio
import time
from pathlib import Path
from typing import Protocol

import msgspec


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Weights are served. `probe_error` is the largest log-prob difference to what the manifest states.

    `load_s` is the whole time; of it `check_s` went into reading and hashing the folder's files, `carry_s` into
    bringing them into the model, `probe_s` into the probe.
    """

    probe_error: float
    load_s: float
    check_s: float
    carry_s: float
    probe_s: float


class Laps:
    """A stopwatch, in seconds."""

    def __init__(self) -> None:
        self._began = self._lap_began = time.monotonic()

    def lap(self) -> float:
        """Since the lap before."""
        now = time.monotonic()
        lap, self._lap_began = now - self._lap_began, now
        return lap

    def total(self) -> float:
        return time.monotonic() - self._began


class Backend(Protocol):
    died: asyncio.Future[None]
    """Gets the error when nothing can be served any more."""

    async def start(self) -> None: ...

    async def apply(self, folder: Path, digest: str, version: int, stream: str = "") -> Outcome:
        """Serve these weights from now on; raises `BadWeights` and goes on with the old ones.

        `stream` is where a learner also broadcasts them, if it does.
        """
        ...

    async def stop(self) -> None: ...
