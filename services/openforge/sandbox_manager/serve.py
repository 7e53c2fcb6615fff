"""Takes requests from the bus, runs attempts, tells how they ended."""

import asyncio
from collections.abc import AsyncIterator

from openforge.bus import Bus, Told
from openforge.env.contract import EnvironmentModule
from openforge.env.registry import draw, load_environment
from openforge.protos import EndReason, EpisodeEnded, EpisodeRequested, EpisodeStarted, Fact
from openforge.runs import RunConfig, submitted_config
from openforge.sandbox.admission import Admission
from openforge.sandbox.choice import open_driver, with_runtime
from openforge.sandbox.contract import SandboxDriver
from openforge.sandbox.pool import Pool
from openforge.sandbox_manager.api.serve import Api
from openforge.sandbox_manager.attempt import Attempt, Attempts
from openforge.sandbox_manager.core import Broke
from openforge.sandbox_manager.env_host.keeper import HostKeeper, HostLost
from openforge.sandbox_manager.keys import KeyMint
from openforge.sandbox_manager.runs import RunWatch
from openforge.sandbox_manager.settings import Settings
from openforge.service import cancel, health, log

_SWEEP_S = 60.0
_ACK_WAIT_S = 10.0  # how long a dead manager's attempts wait for the next one


class Manager:
    def __init__(self, settings: Settings, bus: Bus, shared: Attempts) -> None:
        self._settings = settings
        self._bus = bus
        self._shared = shared
        self._running: dict[tuple[str, int], asyncio.Event] = {}

    async def handle(self, told: Told[EpisodeRequested]) -> AsyncIterator[Fact]:
        """Everything from the request to the end of the attempt."""
        request = told.fact
        key = (request.episode, request.attempt)
        if key in self._running:  # given to us again while we are at it
            await self._running[key].wait()
            return
        ended = self._running[key] = asyncio.Event()
        health.report(in_flight=len(self._running))
        try:
            async for fact in self._attempt(request):
                yield fact
        finally:
            del self._running[key]
            ended.set()
            health.report(in_flight=len(self._running))

    async def _attempt(self, request: EpisodeRequested) -> AsyncIterator[Fact]:
        known = (request.run, request.episode, request.attempt)
        if await self._bus.find(EpisodeEnded, *known):
            return
        if await self._bus.find(EpisodeStarted, *known):
            yield self._unbegun(request, EndReason.HOST_LOST, "the manager that ran this attempt died")
            return
        if self._shared.watch.is_over:
            yield self._unbegun(request, EndReason.CANCELLED, "the run was stopped before the attempt began")
            return
        attempt = Attempt(self._shared, request, draw(self._shared.environment, request.task))
        try:
            box = await attempt.prepare()
            if isinstance(box, Broke):
                ended = await attempt.end(box)
            else:
                yield EpisodeStarted(
                    run=request.run,
                    episode=request.episode,
                    attempt=request.attempt,
                    manager=self._settings.manager,
                    sandbox=box.id,
                    isolation=box.isolation,
                )
                ended = await attempt.end(await attempt.work())
            _log_end(ended)
            yield ended
        finally:
            await asyncio.shield(attempt.clean_up())

    async def give_up(self, told: Told[EpisodeRequested], error: Exception) -> AsyncIterator[Fact]:
        """What could not be handled ends as infrastructure; its slot gets another attempt."""
        yield self._unbegun(told.fact, EndReason.HOST_LOST, f"{type(error).__name__}: {error}"[:500])

    def _unbegun(self, request: EpisodeRequested, reason: EndReason, detail: str) -> EpisodeEnded:
        return EpisodeEnded(
            run=request.run,
            episode=request.episode,
            attempt=request.attempt,
            reason=reason,
            detail=detail,
            isolation=self._shared.driver.isolation,
        )


def _log_end(ended: EpisodeEnded) -> None:
    log.info(
        "attempt ended",
        run=ended.run,
        episode=ended.episode,
        attempt=ended.attempt,
        reason=ended.reason,
        detail=ended.detail,
        agent_s=round(ended.agent_s, 3),
        wall_s=round(ended.wall_s, 3),
    )


async def _config(settings: Settings, bus: Bus, stop: asyncio.Event) -> RunConfig | None:
    """The run's config as soon as there is one; None where we were stopped first."""
    submitted = asyncio.create_task(submitted_config(bus, settings.run))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({submitted, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not submitted.done():
        submitted.cancel()
        return None
    return submitted.result()[0]


async def _warm_up(hosts: HostKeeper, environment: EnvironmentModule, config: RunConfig) -> None:
    """The first attempts should find the env host with its harness imported."""
    if environment.HARNESSES.get(config.environment.harness) == "pipeline":
        try:
            await hosts.ready()
        except HostLost as error:
            log.error("no env host yet", why=str(error))


async def _keep_swept(driver: SandboxDriver, settings: Settings) -> None:
    """What managers of this run left on this host that died and did not come back."""
    while True:
        await asyncio.sleep(_SWEEP_S)
        orphans = await driver.reconcile({"service": "sandbox_manager", "run": settings.run})
        if orphans:
            log.info("reconciled", orphans=orphans)


async def serve(settings: Settings, bus: Bus, stop: asyncio.Event) -> None:
    config = await _config(settings, bus, stop)
    if config is None:
        return
    environment = load_environment(config.environment.name)
    labels = {"service": "sandbox_manager", "run": settings.run, "manager": settings.manager}
    driver = await open_driver(
        with_runtime(settings, config.environment.runtime),
        settings.home / "sandboxes",
        proxy_socket=settings.sockets / "proxy.sock",
        owner=settings.manager,
        allow_reduced=config.run.trusted_only,
    )
    if driver.isolation == "reduced":
        log.warning("reduced isolation", why="not root: sandboxes have no user and no control groups of their own")
    swept = await driver.reconcile(labels)
    log.info("reconciled", orphans=swept)
    hosts = HostKeeper(driver, config.environment.name, settings, labels)
    watch = RunWatch(bus, settings.run)
    pool = Pool(
        driver, Admission(at_once=settings.manager_creates, waiting=settings.manager_slots + settings.manager_warm)
    )
    shared = Attempts(
        bus, driver, await KeyMint.open(bus), hosts, watch, config, environment, labels, pool, settings.manager_warm
    )
    manager = Manager(settings, bus, shared)
    api = Api(settings, driver, labels=labels, bus=bus, replica=settings.manager)
    try:
        if settings.sandbox_api_port:
            await api.start()
        async with asyncio.TaskGroup() as group:
            following = group.create_task(watch.follow())
            warming = group.create_task(_warm_up(hosts, environment, config))
            sweeping = group.create_task(_keep_swept(driver, settings))
            await watch.caught_up.wait()
            working = group.create_task(
                bus.work(
                    service="sandbox_manager",
                    fact=EpisodeRequested,
                    handler=manager.handle,
                    on_dead=manager.give_up,
                    run=settings.run,
                    in_flight=settings.manager_slots,
                    ack_wait_s=_ACK_WAIT_S,
                )
            )
            await stop.wait()
            await cancel(working, following, warming, sweeping)
    finally:
        await api.close()
        await hosts.close()
        await pool.drain()
        await driver.close()
