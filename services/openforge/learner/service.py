"""Carries facts to the batcher and its decisions to the backend and the bus.

Promises: a batch is committed by its `BatchTrained`, which only one learner can tell; a restarted learner
computes again what is recorded after its checkpoint, in the recorded order, before anything new, and
never uses a version for other data; weights are complete on disk before their fact.

The backend lives in one thread of its own, so that the bus stays alive during a step.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from typing import NoReturn

import msgspec

from openforge.bus import CAUGHT_UP, AlreadyTold, Bus, Cursors, Told, tracing
from openforge.learner.backends.choose import backend_for
from openforge.learner.backends.contract import Backend, StepStats
from openforge.learner.batcher import Batcher, Done, Retire, State, Train, Wait
from openforge.learner.checkpoints import Checkpoint, Memory
from openforge.learner.facts import batch_trained, retirements
from openforge.learner.identity import ConfigChanged, training_digest
from openforge.learner.lineage import ExpertsLost, LineageBroken, recorded_replay_of, replay_of
from openforge.learner.lock import only_one
from openforge.learner.offer import Offer
from openforge.learner.outlet import Outlet, insisting
from openforge.learner.publisher import Publisher
from openforge.learner.routing import Replay
from openforge.learner.rules import checkpoints_of, oldest_allowed, rules_of
from openforge.learner.settings import Settings
from openforge.learner.step import Batch, Step, batch_of, step_of
from openforge.learner.thread import SlowThread
from openforge.learner.trajectories import header_of
from openforge.protos import (
    BatchTrained,
    Fact,
    GroupClosed,
    GroupOpened,
    PolicyPublished,
    PolicyServed,
    TrajectoryRetired,
    TrajectoryVerified,
)
from openforge.protos.trajectory import env_token
from openforge.runs import RunConfig, canonical
from openforge.runs.submit import submitted_config
from openforge.service import BadSettings, Zombie, cancel, health, log
from openforge.weights.stores import store_at

FOLLOWED = ("group", "trajectory", "policy")


async def serve(settings: Settings, bus: Bus, stop: asyncio.Event) -> None:
    config, _ = await submitted_config(bus, settings.run)
    with only_one(settings.home):
        learner = Learner(settings, bus, config)
        work = asyncio.create_task(learner.live())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((work, stopping), return_when=asyncio.FIRST_COMPLETED)
        await learner.rest(work)
        stopping.cancel()


class Learner:
    def __init__(self, settings: Settings, bus: Bus, config: RunConfig) -> None:
        self._bus = bus
        self._config = config
        self._run = config.run.name
        self._digest = training_digest(config)
        self._weights = settings.home / "weights"
        self._store = store_at(config.weights.store, self._run, self._weights, bus.weights)
        self._checkpoints = checkpoints_of(settings.home, config)
        self._offer = Offer(config, self._weights, settings.broadcast_listen)
        self._slow = SlowThread("backend")
        self._backend: Backend
        self._outlet: Outlet
        self._batcher = Batcher(rules_of(config))
        self._cursors = Cursors()
        self._computed = 0
        self._saved = 0
        self._rewards = deque[float](maxlen=config.learner.checkpoint_every)
        self._ahead = False
        self._saving: asyncio.Task[None] | None = None
        self._published: PolicyPublished | None = None
        self._served: dict[str, PolicyServed] = {}
        self._payloads: dict[str, TrajectoryVerified] = {}
        self._own: set[str] = set()
        self._caught_up = asyncio.Event()
        self._changed = asyncio.Event()

    # Start

    async def live(self) -> None:
        await self._wake()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._act())
            if self._offer.address:
                group.create_task(self._offer.keep())

    async def _wake(self) -> None:
        """Load the model and the newest checkpoint that fits what is recorded."""
        await insisting(self._store.check)
        self._checkpoints.tidy()
        self._backend = await self._slow.call(backend_for, self._config)
        publisher = Publisher(self._backend, self._config, self._weights)
        self._outlet = Outlet(publisher, self._store, self._slow, self._config.engine.keep_versions)
        self._served = {told.fact.engine: told.fact for told in await self._bus.read(PolicyServed, self._run)}
        for checkpoint in self._checkpoints.newest_first():
            if await self._restore(checkpoint):
                break
        log.info("woke", run=self._run, version=self._computed, backend=self._config.learner.backend)

    async def _restore(self, checkpoint: Checkpoint) -> bool:
        version = checkpoint.memory.version
        recorded = await self._bus.find(BatchTrained, self._run, version)
        if recorded is None:
            log.warning("checkpoint put aside", version=version, why="the bus has no such batch")
            return False
        self._expect(checkpoint.memory.config_digest, version)
        try:
            await self._slow.call(self._backend.load, checkpoint.state)
        except BadSettings:
            raise  # it is whole, and other settings load it
        except Exception:  # the boundary to torch: whatever it finds in broken files, half of them is loaded now
            aside = self._checkpoints.put_aside(checkpoint)
            log.error("checkpoint cannot be loaded; the next start takes the one before", moved_to=str(aside))
            raise
        self._batcher = Batcher(rules_of(self._config), msgspec.msgpack.decode(checkpoint.memory.batcher, type=State))
        self._cursors = Cursors(checkpoint.memory.cursors)
        self._computed = self._saved = version
        self._rewards.extend(checkpoint.memory.rewards)
        return True

    def _expect(self, digest: str, version: int) -> None:
        if digest != self._digest:
            raise ConfigChanged(self._run, version, digest, self._digest)

    # Run

    async def _follow(self) -> NoReturn:
        async for told in self._bus.follow(FOLLOWED, run=self._run, cursors=self._cursors):
            if told is CAUGHT_UP:
                self._caught_up.set()
            else:
                self._fold(told)
            self._changed.set()
        raise RuntimeError("the bus stopped telling facts")

    def _fold(self, told: Told[Fact]) -> None:
        fact = told.fact
        self._cursors = self._cursors.after(told)
        if told.subject in self._own:
            self._own.discard(told.subject)
            return
        match fact:
            case BatchTrained() | TrajectoryRetired() | PolicyPublished() if self._caught_up.is_set():
                raise Zombie(f"another learner told {told.subject}")
            case TrajectoryVerified() if fact.purpose == "train":
                self._payloads[fact.episode] = fact
                self._batcher.apply(header_of(fact, self._backend.vocabulary, self._backend.takes))
                if not self._batcher.holds(fact.episode, fact.group):
                    del self._payloads[fact.episode]
            case BatchTrained():
                self._batcher.apply(fact)
                self._forget(fact.episodes)
            case TrajectoryRetired():
                self._batcher.apply(fact)
                self._forget([fact.episode])
            case GroupOpened() | GroupClosed():
                self._batcher.apply(fact)
            case PolicyServed():
                self._served[fact.engine] = fact
            case _:
                pass

    def _forget(self, episodes: Iterable[str]) -> None:
        for episode in episodes:
            self._payloads.pop(episode, None)

    async def _act(self) -> NoReturn:
        await self._caught_up.wait()
        await self._compute_recorded()
        await self._publish_newest()
        health.ready(version=self._batcher.version)
        log.info("ready", run=self._run, version=self._computed)
        while True:
            self._changed.clear()
            match self._batcher.decide(time.time()):
                case Train() as action:
                    await self._train(action)
                case Retire() as action:
                    await self._retire(action)
                case Wait() as action:
                    await self._rest_until(action.until)
                case Done():
                    await self._save()
                    await self._rest_until(None)

    async def _rest_until(self, at: float | None) -> None:
        try:
            async with asyncio.timeout(None if at is None else max(0.0, at - time.time())):
                await self._changed.wait()
        except TimeoutError:
            pass

    # Recorded batches

    async def _compute_recorded(self) -> None:
        """Bring the weights to the version that is recorded, with the recorded batches."""
        while self._computed < self._batcher.version:
            told = await self._bus.find(BatchTrained, self._run, self._computed + 1)
            if told is None:
                raise LineageBroken(
                    f"run {self._run!r}: version {self._batcher.version} is recorded but batch "
                    f"{self._computed + 1} is not: restore the stream POLICY, or start a run of another name"
                )
            fact = told.fact
            self._expect(fact.config_digest, fact.version)
            log.info("computing again", run=self._run, version=fact.version, episodes=len(fact.episodes))
            batch = await self._batch(fact.base, fact.groups, fact.episodes)
            await self._compute(batch, await recorded_replay_of(self._bus.blobs, self._backend.mixture, batch))
            self._arrived(fact)

    async def _batch(self, base: int, groups: Iterable[str], episodes: Iterable[str]) -> Batch:
        trajectories = {episode: await self._trajectory(episode) for episode in episodes}
        size = self._config.pacing.group_size if self._config.algorithm.completion_weights else 0
        return batch_of(base, tuple(groups), trajectories, oldest_allowed(self._config, base), size)

    async def _trajectory(self, episode: str) -> TrajectoryVerified:
        if (held := self._payloads.get(episode)) is not None:
            return held
        header = self._batcher.held().get(episode)
        env = env_token(header.env if header else self._config.environment.name)
        harness = header.harness if header else self._config.environment.harness
        told = await self._bus.find(TrajectoryVerified, self._run, env, harness, episode)
        if told is None:
            raise LineageBroken(
                f"run {self._run!r}: the trajectory of {episode} is on no stream any more, and a batch needs it: "
                f"restore the stream TRAJECTORY, or a checkpoint that is newer than that batch"
            )
        return told.fact

    async def _compute(self, batch: Batch, replay: Replay | None) -> tuple[Step, StepStats]:
        self._ahead = True
        step = await self._slow.call(step_of, batch, self._config.algorithm, self._backend.vocabulary, replay)
        return step, await self._slow.call(self._backend.train, step.sequences, batch.base)

    def _arrived(self, fact: BatchTrained) -> None:
        """The backend's weights are those of a recorded version."""
        self._computed = fact.version
        self._rewards.append(fact.reward_mean)
        self._ahead = False

    # New batches

    async def _train(self, action: Train) -> None:
        version = action.base + 1
        named, held = tracing.of_version(self._run, version), self._payloads
        attempts = [(name, held[name].attempt) for name in action.episodes if name in held]
        links = [tracing.of_attempt(self._run, episode, attempt) for episode, attempt in attempts]
        with tracing.first_span("batch", named, links, run=self._run, version=version, lag=action.lag):
            await self._train_now(action)

    async def _train_now(self, action: Train) -> None:
        began = time.monotonic()
        batch = await self._batch(action.base, action.groups, action.episodes)
        try:
            replay = await replay_of(self._bus.blobs, self._backend.mixture, batch)
        except ExpertsLost as lost:
            for group, why in lost.groups.items():
                await self._retire(self._batcher.lost(group, why))
            return
        with tracing.span("optimizer step"):
            step, stats = await self._compute(batch, replay)
        step_s, others_held = time.monotonic() - began, len(self._payloads) - len(action.episodes)
        fact = batch_trained(self._run, self._digest, action, step, stats, step_s, others_held)
        await self._tell(fact)
        self._arrived(fact)
        self._batcher.apply(fact)
        self._forget(fact.episodes)
        log.info(
            "batch trained",
            run=self._run,
            version=fact.version,
            reward=round(fact.reward_mean, 4),
            lag=fact.lag,
            episodes=len(fact.episodes),
            trained_tokens=fact.trained_tokens,
            step_s=round(fact.step_s, 2),
        )
        with tracing.span("publish"):
            await self._publish(fact.version, 0)
        if fact.version % self._config.learner.checkpoint_every == 0:
            await self._save()
        health.report(version=fact.version, held=len(self._payloads), lag=fact.lag)

    async def _retire(self, action: Retire) -> None:
        log.info(
            "retired",
            run=self._run,
            group=action.group,
            reason=action.reason,
            lag=action.lag,
            trajectories=len(action.headers),
            why=action.detail,
        )
        for fact in retirements(self._run, action):
            await self._tell(fact)
            self._batcher.apply(fact)
            self._forget([fact.episode])

    async def _tell(self, fact: BatchTrained | TrajectoryRetired | PolicyPublished) -> None:
        """Only one learner can tell it; whoever comes second is a zombie."""
        self._own.add(fact.subject())
        try:
            sequence = await self._bus.tell(fact)
        except AlreadyTold as already:
            raise Zombie(f"another learner told {already.subject} before, at sequence {already.sequence}") from None
        held = self._cursors.sequences
        self._cursors = Cursors({**held, "policy": max(sequence, held.get("policy", 0))})

    # Weights and checkpoints

    async def _publish_newest(self) -> None:
        """Publish the recorded version unless what was published is just that."""
        version = self._computed
        newest = await self._newest_of(version)
        if newest is not None and await self._outlet.holds(newest):
            self._published = newest
            return
        self._published = await self._newest_of(version - 1) if version else None
        await self._publish(version, newest.incarnation + 1 if newest else 0)

    async def _newest_of(self, version: int) -> PolicyPublished | None:
        tolds = await self._bus.read(PolicyPublished, self._run, version)
        return max((told.fact for told in tolds), key=lambda fact: fact.incarnation, default=None)

    async def _publish(self, version: int, incarnation: int) -> None:
        parent = self._published.digest if self._published else ""
        written, location = await self._outlet.write(version, incarnation, parent)
        fact = PolicyPublished(
            run=self._run,
            version=version,
            incarnation=incarnation,
            location=location,
            digest=written.digest,
            bytes=written.bytes,
            stream=self._offer.address,
        )
        await self._tell(fact)
        self._published = fact
        await self._outlet.forget_old(self._served.values())
        log.info("policy published", run=self._run, version=version, incarnation=incarnation, bytes=written.bytes)

    async def _save(self) -> None:
        """A checkpoint of this moment: fold, cursors and weights belong to the same version."""
        if self._computed == self._saved:
            return
        memory = Memory(
            version=self._computed,
            config_digest=self._digest,
            batcher=msgspec.msgpack.encode(self._batcher.state),
            cursors=self._cursors.sequences,
            config=canonical(self._config)[0],
            rewards=tuple(self._rewards),
        )
        self._saving = asyncio.create_task(self._write(memory))
        await asyncio.shield(self._saving)

    async def _write(self, memory: Memory) -> None:
        began = time.monotonic()
        await self._slow.call(self._checkpoints.save, memory, self._backend.save)
        self._saved = memory.version
        log.info("checkpoint saved", run=self._run, version=self._saved, save_s=round(time.monotonic() - began, 2))

    # Stop

    async def rest(self, work: asyncio.Task[None]) -> None:
        """End the work, or raise why it ended by itself. A step in the making is lost, nothing else; between steps
        a checkpoint spares the next start its computing."""
        await cancel(work)
        if not work.cancelled():
            work.result()
        if self._saving is not None:
            await self._saving
        if not self._ahead:
            await self._save()
            if self._caught_up.is_set():  # so the backend is there, and its other ranks
                await self._slow.call(self._backend.close)
