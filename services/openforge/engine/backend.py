"""What serves the weights: our own engine in this process, or a vLLM server that it drives."""

import asyncio
from pathlib import Path
from typing import Protocol

import msgspec


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Weights are served. `probe_error` is the largest log-prob difference to what the manifest states."""

    probe_error: float
    load_s: float


class Backend(Protocol):
    died: asyncio.Future[None]
    """Gets the error when nothing can be served any more."""

    async def start(self) -> None: ...

    async def apply(self, folder: Path, digest: str, version: int) -> Outcome:
        """Serve these weights from now on; raises `BadWeights` and goes on with the old ones."""
        ...

    async def stop(self) -> None: ...
