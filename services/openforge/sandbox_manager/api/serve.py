"""The life of the API: listen, sweep, tell the other replicas, stop."""

import asyncio
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import uvicorn

from openforge.bus import BadSettings, Bus
from openforge.sandbox.admission import Admission
from openforge.sandbox.contract import SandboxDriver
from openforge.sandbox.pool import Pool
from openforge.sandbox_manager.api.app import Desk, make_app
from openforge.sandbox_manager.api.boxes import Boxes
from openforge.sandbox_manager.api.connection import Watched, all_closed
from openforge.sandbox_manager.api.door import Door
from openforge.sandbox_manager.api.jobs import Jobs
from openforge.sandbox_manager.api.keys import ApiKeys
from openforge.sandbox_manager.api.registry import Alone, Shared
from openforge.sandbox_manager.api.relay import Relay
from openforge.sandbox_manager.api.settings import ApiSettings
from openforge.sandbox_manager.api.shapes import CreateRequest
from openforge.service import cancel, log
from openforge.service.sockets import bound

_BACKLOG = 2048
_KEEP_ALIVE_S = 600
_FRAME_BYTES = 4 << 20
_RECONCILE_S = 60.0
_END_S = 5


class Api:
    """Open between `start` and `close`. `labels` are those of all its sandboxes."""

    def __init__(
        self,
        settings: ApiSettings,
        driver: SandboxDriver,
        *,
        labels: Mapping[str, str],
        bus: Bus | None = None,
        replica: str = "",
    ) -> None:
        self._settings = settings
        self._driver = driver
        self._labels = {**labels, "api": "sandboxes"}
        self._bus = bus
        self._replica = replica
        self._tasks: list[asyncio.Task[None]] = []
        self._boxes: Boxes | None = None
        self._jobs: Jobs | None = None
        self._pool: Pool | None = None
        self._registry: Alone | Shared = Alone()
        self._server: uvicorn.Server | None = None
        self.port = settings.sandbox_api_port

    async def start(self, listening: socket.socket | None = None) -> None:
        """Raises `BadSettings` and `OSError`."""
        settings = self._settings
        keys = ApiKeys(settings.sandbox_api_keys)
        if keys.none:
            raise BadSettings("OPENFORGE_SANDBOX_API_KEYS is not set: give at least one key")
        listening = listening or listening_for(settings)
        self.port = listening.getsockname()[1]
        if self._bus is not None:
            url = settings.sandbox_api_url or f"http://{settings.sandbox_api_host}:{self.port}"
            self._registry = await Shared.open(self._bus, self._replica, url)
        swept = await self._driver.reconcile(self._labels)
        admission = Admission(at_once=settings.sandbox_api_creates, waiting=settings.sandbox_api_waiting)
        self._pool = Pool(self._driver, admission)
        self._boxes = Boxes(settings, self._pool, admission, self._registry, self._labels)
        if settings.sandbox_api_warm:
            warm = self._boxes.spec_of("spare", CreateRequest(image=""))
            self._pool.keep(warm, settings.sandbox_api_warm)
        self._jobs = Jobs(
            at_once=settings.sandbox_api_execs,
            output_cap=settings.sandbox_api_output_mb << 20,
            replica=self._registry.replica,
        )
        desk = Desk(self._boxes, self._jobs, keys, self._driver.isolation, self._registry)
        app = Door(Relay(make_app(desk), self._boxes, self._registry), keys)
        self._server = _Server(_config(app))
        self._tasks = [asyncio.create_task(_serve(self._server, listening)), asyncio.create_task(self._sweep())]
        if isinstance(self._registry, Shared):
            await self._registry.tell(self._boxes.room)
            self._tasks.append(asyncio.create_task(self._registry.keep_telling(self._room)))
        while not self._server.started:
            await asyncio.sleep(0.005)
            if self._tasks[0].done():
                self._tasks[0].result()
        log.info("sandbox api", port=self.port, orphans=swept, isolation=self._driver.isolation)

    async def close(self) -> None:
        """Every sandbox is ended; the driver stays open for its owner."""
        if self._server is not None:
            self._server.should_exit = True
        await cancel(*self._tasks[1:])
        if self._jobs is not None:
            await self._jobs.close()
        if self._boxes is not None:
            await self._boxes.close()
        if self._pool is not None:
            await self._pool.drain()
        if self._tasks:
            await self._tasks[0]
        await all_closed()
        if isinstance(self._registry, Shared):
            await self._registry.leave()
        for task in self._tasks:
            if not task.cancelled():
                task.result()

    @property
    def spare(self) -> int:
        """How many sandboxes are ready for who comes."""
        return self._pool.spare if self._pool else 0

    def _room(self) -> int:
        return self._boxes.room if self._boxes else 0

    async def _sweep(self) -> None:
        """What is over ends; now and then also what a dead owner or replica left."""
        assert self._boxes is not None
        assert self._jobs is not None
        reconciled = asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(self._settings.sandbox_api_sweep_s)
            await self._boxes.sweep()
            self._jobs.forget_old()
            if asyncio.get_running_loop().time() - reconciled >= _RECONCILE_S:
                reconciled = asyncio.get_running_loop().time()
                await self._reconcile()

    async def _reconcile(self) -> None:
        orphans = await self._driver.reconcile({})
        forgotten = await self._registry.forget_the_dead() if isinstance(self._registry, Shared) else 0
        if orphans or forgotten:
            log.info("reconciled", orphans=orphans, forgotten=forgotten)


class _Server(uvicorn.Server):
    """Signals are the service's business."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(server: uvicorn.Server, listening: socket.socket) -> None:
    await server.serve(sockets=[listening])


def _config(app: Door) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=Watched,
        ws="websockets-sansio",
        ws_max_size=_FRAME_BYTES,
        loop="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_END_S,
        server_header=False,
    )


def listening_for(settings: ApiSettings) -> socket.socket:
    port = settings.sandbox_api_port
    listening = bound(settings.sandbox_api_host, port, "OPENFORGE_SANDBOX_API_PORT", port)
    listening.listen(_BACKLOG)
    return listening
