"""The embedded engine as a backend: it listens at once, and answers 503 until the first weights are there."""

import asyncio
import contextlib
from pathlib import Path

from openforge.engine.api import make_app
from openforge.engine.backend import Laps, Outcome
from openforge.engine.embedded import EmbeddedEngine, EngineOptions
from openforge.engine.http import Server, bind


class InProcessBackend:
    def __init__(self, url: str, options: EngineOptions) -> None:
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.engine = EmbeddedEngine(options)
        self._url = url
        self._server = Server(make_app(self.engine))
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        socket = bind(self._url)
        self._serving = asyncio.create_task(self._server.serve(sockets=[socket]))

    async def apply(self, folder: Path, digest: str, version: int, stream: str = "") -> Outcome:
        clock = Laps()
        loaded = await self.engine.load(folder, digest)
        if self.engine.worker is not None and not self.died.done():
            self.engine.worker.died.add_done_callback(self._worker_died)
        total = clock.total()
        return Outcome(
            probe_error=loaded.probe_error,
            load_s=total,
            check_s=loaded.check_s,
            carry_s=total - loaded.check_s - loaded.probe_s,
            probe_s=loaded.probe_s,
        )

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._serving is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._serving
        await self.engine.stop()

    def _worker_died(self, died: asyncio.Future[None]) -> None:
        error = None if died.cancelled() else died.exception()
        if error is not None and not self.died.done():
            self.died.set_exception(error)
