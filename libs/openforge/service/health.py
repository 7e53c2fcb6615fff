"""The health file: what supervisors and container runtimes look at.

Promises: the file is always whole (renamed into place) and never older than a few seconds while the
process lives and its event loop turns.
"""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import msgspec

EVERY_S = 2.0


class HealthState(msgspec.Struct, frozen=True, kw_only=True):
    """`at` is Unix seconds; `detail` what the service says of itself."""

    service: str
    pid: int
    ready: bool
    at: float
    detail: dict[str, Any] = {}


class Health:
    """One for each process. Services call `ready` when they can work, and `report` whatever is worth knowing."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._service = ""
        self._ready = False
        self._said = False
        self._detail: dict[str, Any] = {}

    def begin(self, service: str, path: str) -> None:
        self._service, self._path = service, Path(path) if path else None
        self._ready, self._said, self._detail = False, False, {}

    def begun(self) -> None:
        """It works. A service that has said more of itself by now, knows better."""
        if not self._said:
            self.ready()

    def ready(self, **detail: Any) -> None:
        self._ready = self._said = True
        self.report(**detail)

    def not_ready(self, **detail: Any) -> None:
        self._ready, self._said = False, True
        self.report(**detail)

    def report(self, **detail: Any) -> None:
        self._detail |= detail
        self.write()

    @property
    def detail(self) -> dict[str, Any]:
        return self._detail

    @property
    def is_ready(self) -> bool:
        return self._ready

    def write(self) -> None:
        if self._path is None:
            return
        state = HealthState(
            service=self._service, pid=os.getpid(), ready=self._ready, at=time.time(), detail=self._detail
        )
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        beside.write_bytes(msgspec.json.encode(state, enc_hook=str))
        beside.replace(self._path)

    async def keep_writing(self) -> None:
        while True:
            self.write()
            await asyncio.sleep(EVERY_S)


health = Health()


def read_health(path: str | Path) -> HealthState | None:
    """None while the service has not written yet."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=HealthState)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
