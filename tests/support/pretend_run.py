"""A whole run in virtual time, with pretended agents, verifier, engine and learner around the true scheduler core.

Facts of different kinds reach the scheduler with delays of their own, attempts fail, the scheduler
restarts at any moment and folds everything again in another order. The world knows the truth at each
moment and counts every broken promise.
"""

import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Literal

import msgspec

from openforge.protos import (
    BatchTrained,
    BranchCause,
    EndReason,
    EngineIdentity,
    EpisodeFailed,
    EpisodeRequested,
    Fact,
    FailReason,
    FinishReason,
    GroupClosed,
    GroupOpened,
    PolicyPublished,
    PolicyServed,
    RetireReason,
    RunSubmitted,
    Sampling,
    Sequence,
    Span,
    Timing,
    TrajectoryRetired,
    TrajectoryVerified,
    TurnRecorded,
    TurnStatus,
    VersionSpan,
    pack_ids,
    pack_logprobs,
)
from openforge.runs import RunConfig, canonical
from openforge.scheduler.core import Catalogue, Core
from openforge.scheduler.state import Known

KINDS = ("run", "group", "episode", "trajectory", "policy")


class Weather(msgspec.Struct, frozen=True, kw_only=True):
    """What goes wrong, and how long things take (virtual seconds)."""

    seed: int = 0
    failing: float = 0.0
    same_reward: float = 0.0
    step_s: float = 1.0
    serve_s: float = 0.1
    median_s: float = 1.0
    spread: float = 0.9
    delay_s: float = 0.0
    restarts: int = 0
    duplicates: bool = False


class Waiting(msgspec.Struct, frozen=True):
    """A closed group that the learner may train."""

    group: str
    ordinal: int
    oldest: int
    start_version: int
    episodes: tuple[str, ...]
    durations_s: tuple[float, ...]
    same_reward: bool


class PretendRun:
    def __init__(self, config: RunConfig, weather: Weather = Weather()) -> None:
        self.config, self.weather = config, weather
        self.random = random.Random(weather.seed)
        self.now = 0.0
        self.broken: list[str] = []
        self.facts: list[tuple[float, Fact]] = []
        self.stale = self.evicted = 0
        self.lags: list[int] = []
        self.offered_s: list[float] = []
        self.trained_s: list[float] = []
        self.slot_seconds = 0.0
        self.learner_busy_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._undelivered: dict[str, list[tuple[float, Fact]]] = defaultdict(list)
        self._version, self._served = 0, -1
        self._opened: dict[str, GroupOpened] = {}
        self._closed: dict[str, GroupClosed] = {}
        self._gone: set[str] = set()
        self._done: set[str] = set()
        self._requested: dict[str, int] = defaultdict(lambda: -1)
        self._attempt_open: set[str] = set()
        self._verdicts: dict[str, TrajectoryVerified] = {}
        self._durations: dict[str, float] = {}
        self._waiting: dict[str, Waiting] = {}
        self._training = False
        self._refills_at: Counter[int] = Counter()
        self._restarts_at = {self.random.randrange(5, 400) for _ in range(weather.restarts)}
        self._delivered = 0
        self._wakes: set[float] = set()
        self.core = self._new_core(None)

    # The run, from its submission to its end.

    def run(self, until_s: float = float("inf")) -> "PretendRun":
        text, digest = canonical(self.config)
        self._tell(RunSubmitted(run="r", generation=0, config=text, config_digest=digest))
        self._publish(0)
        self._decide()
        while self._events and self._events[0][0] <= until_s:
            self.now, _, act = heapq.heappop(self._events)
            act()
            self._decide()
        return self

    @property
    def steps(self) -> int:
        return self._version

    def opened(self, purpose: Literal["train", "eval"]) -> list[GroupOpened]:
        return [group for group in self._opened.values() if group.purpose == purpose]

    @property
    def still_open(self) -> list[str]:
        return sorted(self._opened.keys() - self._closed.keys())

    @property
    def gone(self) -> int:
        return len(self._gone)

    @property
    def idle_share(self) -> float:
        """Of the slots that the run file allows, the share of time in which no attempt was in them."""
        return 1 - self.slot_seconds / (self.config.pacing.in_flight * self.now) if self.now else 0.0

    @property
    def trained_over_offered(self) -> float:
        """Mean duration of what was trained over that of what was finished: below 1, long work is thrown away."""
        trained_s, offered_s = self.trained_s, self.offered_s
        return (sum(trained_s) / len(trained_s)) / (sum(offered_s) / len(offered_s))

    # The scheduler and what reaches it.

    def _new_core(self, known: Known | None) -> Core:
        core = Core("r", known)
        core.equip(Catalogue(tasks=("a", "b", "c"), env_kind="pipeline"))
        return core

    def _decide(self) -> None:
        while decisions := self.core.due(self.now):
            for decision in decisions:
                self._check(decision)
                self._record(decision)
                self.core.apply(decision, self.now)
                self._happen(decision)
        retry = self.core.next_due()
        if retry is not None and retry > self.now and retry not in self._wakes:
            self._wakes.add(retry)
            heapq.heappush(self._events, (retry, next(self._count), lambda: None))

    def _tell(self, fact: Fact) -> None:
        """Others' facts: they reach the scheduler later, in order within their kind."""
        self._record(fact)
        queue = self._undelivered[fact.kind]
        earliest = queue[-1][0] if queue else self.now
        queue.append((max(earliest, self.now + self.random.random() * self.weather.delay_s), fact))
        self._at(queue[-1][0] - self.now, lambda kind=fact.kind: self._deliver(kind))

    def _deliver(self, kind: str) -> None:
        if self._undelivered[kind]:
            _, fact = self._undelivered[kind].pop(0)
            self.core.apply(fact, self.now)
            if self.weather.duplicates and kind != "policy":
                self.core.apply(fact, self.now)
        self._delivered += 1
        if self._delivered in self._restarts_at:
            self._restart()

    def _restart(self) -> None:
        """A new scheduler folds all facts, kinds in any order, perhaps from a snapshot of the old one."""
        known = Known.decode(self.core.known.encode()) if self.random.random() < 0.5 else None
        by_kind = {kind: [(at, fact) for at, fact in self.facts if fact.kind == kind] for kind in KINDS}
        if known is not None:
            by_kind = {kind: self._undelivered[kind] for kind in KINDS}
        core = self._new_core(known)
        while any(by_kind.values()):
            kind = self.random.choice([kind for kind, facts in by_kind.items() if facts])
            at, fact = by_kind[kind][0]
            by_kind[kind] = by_kind[kind][1:]
            core.apply(fact, min(at, self.now))
        self._undelivered.clear()
        self.core = core

    def _record(self, fact: Fact) -> None:
        self.facts.append((self.now, fact))

    def _at(self, after_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + max(after_s, 0.0), next(self._count), act))

    # Promises, checked against what is true at this moment.

    def _check(self, decision: Fact) -> None:
        match decision:
            case GroupOpened():
                self._check_opening(decision)
            case EpisodeRequested():
                self._check_request(decision)
            case GroupClosed():
                self._promise(decision.group in self._opened and decision.group not in self._closed, "closed twice")
                for member in decision.members:
                    has_verdict = member.episode in self._verdicts
                    self._promise(has_verdict == (member.failed is None), "closed over a wrong verdict")
                    self._promise(member.episode not in self._attempt_open, "closed over an open attempt")

    def _check_opening(self, group: GroupOpened) -> None:
        pacing = self.config.pacing
        self._promise(group.group not in self._opened, "a group opened twice")
        slots = sum(opened.size for name, opened in self._opened.items() if name not in self._closed)
        done = sum(episode.rpartition("-")[0] not in self._closed for episode in self._done)
        self._promise(slots - done + group.size <= pacing.in_flight, "more slots open than in_flight")
        if group.purpose == "eval":
            running = [name for name in self._opened if name not in self._closed and name.startswith("g")]
            self._promise(not running, "evaluation beside training")
            self._promise(group.start_version == self._served, "evaluation of a version that is not served")
            return
        evals = [name for name in self._opened if name not in self._closed and name.startswith("e")]
        self._promise(not evals, "training beside evaluation")
        live = sum(opened.purpose == "train" and name not in self._gone for name, opened in self._opened.items())
        bound = min(pacing.max_lag + self._served + 1, self.config.run.steps) * pacing.groups_per_step
        self._promise(live + 1 <= bound, "admission beyond the bound")

    def _check_request(self, request: EpisodeRequested) -> None:
        self._promise(request.group in self._opened, "an episode of no group")
        self._promise(request.attempt == self._requested[request.episode] + 1, "an attempt skipped or repeated")
        self._promise(request.episode not in self._attempt_open, "two attempts open in one slot")
        self._promise(request.episode not in self._done, "an attempt in a slot that is done")
        self._promise(request.attempt < self.config.pacing.attempts, "more attempts than allowed")

    def _promise(self, kept: bool, otherwise: str) -> None:
        if not kept:
            self.broken.append(f"{self.now:.2f}: {otherwise}")

    # Agents and the verifier.

    def _happen(self, decision: Fact) -> None:
        match decision:
            case GroupOpened():
                self._opened[decision.group] = decision
            case EpisodeRequested():
                self._begin(decision)
            case GroupClosed():
                self._close(decision)

    def _begin(self, request: EpisodeRequested) -> None:
        self._requested[request.episode] = request.attempt
        self._attempt_open.add(request.episode)
        duration_s = self.weather.median_s * self.random.lognormvariate(0.0, self.weather.spread)
        version = self._served
        self._at(duration_s, lambda: self._end(request, version, duration_s))

    def _end(self, request: EpisodeRequested, version: int, duration_s: float) -> None:
        self._attempt_open.discard(request.episode)
        self.slot_seconds += duration_s
        self._record(self._turn(request, max(version, 0)))
        if self.random.random() < self.weather.failing:
            reason = self.random.choice([FailReason.SANDBOX_FAILED, FailReason.HOST_LOST, FailReason.ENGINE_FAILED])
            if request.attempt + 1 >= self.config.pacing.attempts or request.group in self._gone:
                self._done.add(request.episode)
            self._tell(EpisodeFailed(run="r", episode=request.episode, attempt=request.attempt, reason=reason))
            return
        self._done.add(request.episode)
        self._durations[request.episode] = duration_s
        self._verdicts[request.episode] = verdict = self._verdict(request, version)
        self._tell(verdict)

    def _turn(self, request: EpisodeRequested, version: int) -> TurnRecorded:
        return TurnRecorded(
            run="r",
            episode=request.episode,
            attempt=request.attempt,
            turn=0,
            parent=None,
            cause=BranchCause.START,
            prefix=0,
            suffix=pack_ids([1]),
            sampled=pack_ids([2, 3]),
            logprobs=pack_logprobs([-0.5, -0.5]),
            versions=(VersionSpan(0, 2, version),),
            finish=FinishReason.STOP,
            status=TurnStatus.DELIVERED,
            sampling=Sampling(temperature=1.0),
            engine=EngineIdentity(engine="one"),
            timing=Timing(received_at=self.now),
        )

    def _verdict(self, request: EpisodeRequested, version: int) -> TrajectoryVerified:
        rng = random.Random(f"{self.weather.seed}/{request.group}")
        reward = 0.0 if rng.random() < self.weather.same_reward else float(self.random.random() < 0.5)
        return TrajectoryVerified(
            run="r",
            episode=request.episode,
            attempt=request.attempt,
            group=request.group,
            purpose=request.purpose,
            task=request.task,
            harness=request.harness,
            sequences=(
                Sequence(
                    ids=pack_ids([1, 2, 3]),
                    loss=(Span(1, 2),),
                    logprobs=pack_logprobs([-0.5, -0.5]),
                    versions=(VersionSpan(1, 1, version), VersionSpan(2, 1, max(version, self._served))),
                    turns=(0,),
                ),
            ),
            temperature=1.0,
            reward=reward,
            ended=EndReason.FINISHED,
            turns=1,
            sampled_tokens=2,
        )

    # Learner and engine.

    def _close(self, closed: GroupClosed) -> None:
        self._closed[closed.group] = closed
        opened = self._opened[closed.group]
        verdicts = [self._verdicts[member.episode] for member in closed.members if member.failed is None]
        if opened.purpose == "eval":
            return
        if len(verdicts) < 2:
            self._gone.add(closed.group)
            for verdict in verdicts:
                self._retire(verdict.episode, closed.group, RetireReason.TOO_FEW)
            return
        episodes = tuple(verdict.episode for verdict in verdicts)
        waiting = Waiting(
            closed.group,
            opened.ordinal,
            min(verdict.oldest_version() or 0 for verdict in verdicts),
            opened.start_version,
            episodes,
            tuple(self._durations[episode] for episode in episodes),
            len({verdict.reward for verdict in verdicts}) == 1,
        )
        self.offered_s += waiting.durations_s
        self._waiting[closed.group] = waiting
        self._try_step()

    def _retire(self, episode: str, group: str, reason: RetireReason) -> None:
        self._tell(TrajectoryRetired(run="r", episode=episode, group=group, reason=reason, version=self._version))

    def _evict(self, waiting: Waiting, reason: RetireReason) -> None:
        self.evicted += 1
        self._gone.add(waiting.group)
        del self._waiting[waiting.group]
        for episode in waiting.episodes:
            self._retire(episode, waiting.group, reason)

    def _try_step(self) -> None:
        pacing, version = self.config.pacing, self._version
        if self._training or version >= self.config.run.steps:
            return
        self._sort_out(version)
        oldest_first = sorted(self._waiting.values(), key=lambda waiting: waiting.ordinal)
        if pacing.staleness == "wait" and not self._deadlines_hold(oldest_first):
            return
        batch = oldest_first[: pacing.groups_per_step]
        if len(batch) < pacing.groups_per_step:
            return
        self._training = True
        for waiting in batch:
            del self._waiting[waiting.group]
        self.learner_busy_s += self.weather.step_s
        self._at(self.weather.step_s, lambda: self._commit(batch))

    def _sort_out(self, version: int) -> None:
        pacing = self.config.pacing
        for waiting in list(self._waiting.values()):
            too_old = version - waiting.oldest > pacing.max_lag
            if too_old and pacing.staleness != "mask":
                self._evict(waiting, RetireReason.STALE)
            elif (
                pacing.dynamic_sampling and waiting.same_reward and self._refills_at[version] < pacing.refills_per_step
            ):
                self._refills_at[version] += 1
                self._evict(waiting, RetireReason.ZERO_VARIANCE)

    def _deadlines_hold(self, oldest_first: list[Waiting]) -> bool:
        """After the oldest batch, every other group can still be trained in time."""
        pacing, version = self.config.pacing, self._version
        left = [waiting.oldest for waiting in oldest_first[pacing.groups_per_step :]]
        left += [
            group.start_version
            for name, group in self._opened.items()
            if group.purpose == "train" and name not in self._closed and name not in self._gone
        ]
        return all(
            sum(start <= version + k - pacing.max_lag for start in left) <= k * pacing.groups_per_step
            for k in range(pacing.max_lag + 1)
        )

    def _commit(self, batch: list[Waiting]) -> None:
        base = self._version
        lag = max(base - waiting.oldest for waiting in batch)
        if self.config.pacing.staleness == "mask":
            lag = min(lag, self.config.pacing.max_lag)  # older tokens are context now
        self._promise(lag <= self.config.pacing.max_lag, "a batch older than max_lag")
        self.lags.append(lag)
        self.trained_s += [seconds for waiting in batch for seconds in waiting.durations_s]
        self._version, self._training = base + 1, False
        self._tell(
            BatchTrained(
                run="r",
                version=base + 1,
                base=base,
                episodes=tuple(episode for waiting in batch for episode in waiting.episodes),
                groups=tuple(waiting.group for waiting in batch),
                config_digest="d",
                lag=lag,
                reward_mean=0.5,
            )
        )
        self._publish(base + 1)
        self._try_step()

    def _publish(self, version: int) -> None:
        self._tell(PolicyPublished(run="r", version=version, incarnation=0, location="/", digest=str(version)))
        self._at(self.weather.serve_s, lambda: self._serve(version))

    def _serve(self, version: int) -> None:
        self._served = max(self._served, version)
        self._tell(
            PolicyServed(run="r", version=version, incarnation=0, engine="one", digest=str(version), probe_error=0.0)
        )
        self._try_step()
