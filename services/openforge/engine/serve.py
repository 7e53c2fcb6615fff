"""The life of an engine: follow what is published, serve the newest, say so.

Promises: a version is told as served only after it answers with the probe's log-probs; bad weights, and a store that
gives none, leave what is served as it is; the process ends with an error only when it has nothing to serve.
"""

import asyncio
import os
import secrets
import tempfile
import time
from pathlib import Path

import msgspec

from openforge.bus import CAUGHT_UP, AlreadyTold, Bus, Cursors, tracing
from openforge.bus.link import Backoff
from openforge.engine.backend import Backend, Outcome
from openforge.engine.measuring import Meter
from openforge.engine.policy import Newest
from openforge.engine.settings import Settings
from openforge.engine.waves import Fleet
from openforge.protos import PolicyPublished, PolicyServed
from openforge.runs import RunConfig, submitted_config
from openforge.service import cancel, health, log
from openforge.weights import BadWeights
from openforge.weights.cache import Cache
from openforge.weights.objects import StoreBroken, StoreRefused

_WORTH_SAYING_S = 0.01


class NothingToServe(RuntimeError):
    """The weights that were published cannot be loaded, and no others are served."""


async def serve(settings: Settings, bus: Bus, stop: asyncio.Event) -> None:
    health.not_ready(waiting_for="the run")
    engine = Engine(settings, bus)
    living, stopping = asyncio.create_task(engine.live()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((living, stopping), return_when=asyncio.FIRST_COMPLETED)
        if living.done():
            living.result()
    finally:
        await cancel(living, stopping)


class Engine:
    """One engine process of a run. `name` is its own, never used before."""

    def __init__(self, settings: Settings, bus: Bus) -> None:
        self.name = settings.engine_name or f"engine-{os.getpid()}-{secrets.token_hex(4)}"
        self._settings = msgspec.structs.replace(settings, engine_name=self.name)
        self._bus = bus
        self._newest = Newest()
        self._fleet = Fleet(self.name, settings.engine_waves)
        self._meter = Meter(bus, settings, self.name)
        self._cache = Cache(cache_folder(settings), bus.weights)
        self._changed = asyncio.Event()
        self._fleet_changed = asyncio.Event()

    async def live(self) -> None:
        """Until it is cancelled, or has nothing to serve."""
        config, _ = await submitted_config(self._bus, self._settings.run)
        if config.engine.kind == "endpoint":
            from openforge.engine.endpoint import serve_endpoint

            return await serve_endpoint(self._settings, self._bus, config, self.name)
        backend = make_backend(self._settings, config)
        try:
            await backend.start()
            health.not_ready(waiting_for="the first version", url=self._settings.engine_url, engine=self.name)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow())
                group.create_task(self._keep_newest_served(backend))
                group.create_task(_wait(backend.died))
                if config.pacing.in_flight_least:
                    group.create_task(self._meter.run())
        finally:
            await backend.stop()
            self._cache.close()

    async def _follow(self) -> None:
        caught_up = False
        async for told in self._bus.follow(("policy",), run=self._settings.run, cursors=Cursors()):
            if told is CAUGHT_UP:
                caught_up = True
            elif isinstance(told.fact, PolicyPublished):
                self._newest.apply(told.fact)
            elif isinstance(told.fact, PolicyServed):
                self._fleet.apply(told.fact)
                self._fleet_changed.set()
            if caught_up and self._newest.due() is not None:
                self._changed.set()

    async def _keep_newest_served(self, backend: Backend) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            while (published := self._newest.due()) is not None:
                if await self._fetched(published) is not None:
                    await self._own_turn(published)
                    await self._apply(backend, self._newest.due() or published)

    async def _fetched(self, published: PolicyPublished) -> Path | None:
        """The folder of these weights; None where they are no good, or others are due before they could be had."""
        backoff, began = Backoff(first_s=0.5, last_s=30.0), time.monotonic()
        while self._newest.due() == published:
            try:
                folder = await self._cache.folder(published.location, published.digest)
            except BadWeights as error:
                self._refuse(published, error)
                return None
            except (StoreBroken, StoreRefused) as error:
                if isinstance(error, StoreRefused) and self._newest.served is None:
                    raise
                log.warning("weights cannot be fetched yet", version=published.version, why=str(error))
                await backoff.pause()
            else:
                if str(folder) != published.location and (fetch_s := time.monotonic() - began) > _WORTH_SAYING_S:
                    log.info("weights fetched", version=published.version, fetch_s=round(fetch_s, 3))
                return folder
        return None

    async def _own_turn(self, published: PolicyPublished) -> None:
        """Until the engines whose turn is before serve these weights, or take too long."""
        try:
            async with asyncio.timeout(self._settings.wave_timeout_s):
                while self._fleet.waits_for(published):
                    self._fleet_changed.clear()
                    await self._fleet_changed.wait()
        except TimeoutError:
            late = sorted(self._fleet.waits_for(published))
            log.warning("engines are late, going on without them", engines=late, version=published.version)

    async def _apply(self, backend: Backend, published: PolicyPublished) -> None:
        named = tracing.of_version(self._settings.run, published.version)
        with tracing.span("serve version", named, version=published.version, engine=self.name):
            await self._apply_now(backend, published)

    async def _apply_now(self, backend: Backend, published: PolicyPublished) -> None:
        if (folder := await self._fetched(published)) is None:
            return
        try:
            with self._meter.looking_away():
                outcome = await backend.apply(folder, published.digest, published.version, published.stream)
        except BadWeights as error:
            self._refuse(published, error)
            return
        self._newest.serves(published)
        await self._cache.serves(folder)
        await self._tell_served(published, outcome)
        log.info(
            "policy served",
            version=published.version,
            incarnation=published.incarnation,
            probe_error=outcome.probe_error,
            load_s=round(outcome.load_s, 3),
        )
        health.ready(waiting_for="", version=published.version, incarnation=published.incarnation)

    def _refuse(self, published: PolicyPublished, error: BadWeights) -> None:
        self._newest.refuses(published)
        log.error(
            "weights refused",
            version=published.version,
            incarnation=published.incarnation,
            why=str(error),
            still_serving=self._newest.served is not None,
        )
        if self._newest.served is None and self._newest.due() is None:
            raise NothingToServe(f"no published weights can be served: {error}") from error

    async def _tell_served(self, published: PolicyPublished, outcome: Outcome) -> None:
        served = PolicyServed(
            run=self._settings.run,
            version=published.version,
            incarnation=published.incarnation,
            engine=self.name,
            digest=published.digest,
            probe_error=outcome.probe_error,
            load_s=outcome.load_s,
            check_s=outcome.check_s,
            carry_s=outcome.carry_s,
            probe_s=outcome.probe_s,
        )
        try:
            await self._bus.tell(served)
        except AlreadyTold:  # a named engine that was started again serves what it served before
            log.info("policy already told as served", version=published.version)


def cache_folder(settings: Settings) -> Path:
    if settings.weight_cache:
        return Path(settings.weight_cache).absolute()
    home = Path(settings.home) if settings.home else Path(tempfile.gettempdir(), f"openforge-{os.getuid()}")
    return home.absolute() / "weight-cache"


def make_backend(settings: Settings, config: RunConfig) -> Backend:
    """Heavy imports wait until the run says which backend it needs and with how many threads."""
    if config.engine.kind == "vllm":
        from openforge.engine.vllm import VllmBackend

        return VllmBackend(settings, config)
    threads = str(config.engine.threads)
    os.environ |= {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}
    from openforge.engine.embedded import EngineOptions
    from openforge.engine.in_process import InProcessBackend

    options = EngineOptions(
        dtype=config.engine.dtype,
        threads=config.engine.threads,
        max_requests=config.engine.max_requests,
        context=config.model.context,
        cache_mb=settings.engine_cache_mb,
        fill_tokens=settings.engine_fill_tokens,
        batch_invariant=config.engine.batch_invariant,
        routed_experts=config.learner.routing_replay,
    )
    return InProcessBackend(settings.engine_url, options)


async def _wait(died: asyncio.Future[None]) -> None:
    await died
