"""A whole run in virtual time on the true scheduler core and batcher: agents, engine and learner are pretended.

Promises: the same seed gives the same durations to the same group whatever the rule; the world knows which
version sampled each token and counts every broken promise; scheduler and learner may be lost at any moment, and
come back from their snapshot or from the facts alone.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from statistics import NormalDist

import msgspec

from openforge.learner.batcher import Batcher, Retire, Rules, State, Train, Wait
from openforge.learner.trajectories import Header, VersionCount
from openforge.protos import (
    BatchTrained,
    EndReason,
    EpisodeFailed,
    EpisodeRequested,
    Fact,
    FailReason,
    GroupClosed,
    GroupOpened,
    PolicyServed,
    RetireReason,
    RunSubmitted,
    TrajectoryRetired,
    TrajectoryVerified,
)
from openforge.runs import RunConfig, canonical
from openforge.scheduler.core import Catalogue, Core
from openforge.scheduler.state import Known

RUN = "r"
TOKENS_PER_S = 100.0
"""Sampled tokens of an agent in one second of its duration."""

KINDS = ("run", "group", "episode", "trajectory", "policy")

CHECKPOINT_EVERY = 5

Durations = Callable[[int, int, int], list[float]]
"""(ordinal, size, attempt) -> how long the members of that group take, in seconds."""


class Nature(msgspec.Struct, frozen=True, kw_only=True):
    """How long things take (virtual seconds) and what goes wrong. A batch takes `step_s` for each `groups_per_step`."""

    seed: int = 0
    step_s: float = 1.0
    serve_s: float = 0.05
    failing: float = 0.0
    restarts: int = 0


def log_normal(seed: int, median_s: float = 1.0, p99_over_p50: float = 10.0) -> Durations:
    """Durations whose 99th percentile is so many times their median."""
    sigma = math.log(p99_over_p50) / NormalDist().inv_cdf(0.99)

    def drawn(ordinal: int, size: int, attempt: int) -> list[float]:
        rng = random.Random(f"{seed}/{ordinal}/{attempt}")
        return [median_s * rng.lognormvariate(0.0, sigma) for _ in range(size)]

    return drawn


def as_it_was(groups_s: list[list[float]]) -> Durations:
    """Each group takes as long as the group of that ordinal took in a real run; from the first again after the last."""

    def drawn(ordinal: int, size: int, attempt: int) -> list[float]:
        members_s = groups_s[ordinal % len(groups_s)]
        return [members_s[member % len(members_s)] for member in range(size)]

    return drawn


def shuffled(seed: int, durations_s: list[float]) -> Durations:
    """Durations drawn from those of a real run, with replacement, each for itself."""

    def drawn(ordinal: int, size: int, attempt: int) -> list[float]:
        return random.Random(f"{seed}/{ordinal}/{attempt}").choices(durations_s, k=size)

    return drawn


class Tally(msgspec.Struct, kw_only=True):
    """What a reader wants to know of a run that ended. Durations in seconds, `offered` of all finished episodes."""

    ended_s: float = 0.0
    batches: int = 0
    episodes: int = 0
    trained_groups: int = 0
    trained_episodes: int = 0
    offered_episodes: int = 0
    offered_s: float = 0.0
    offered_tokens: int = 0
    trained_tokens: int = 0
    masked_tokens: int = 0
    discarded_tokens: int = 0
    busy_s: float = 0.0
    lags: Counter[int] = msgspec.field(default_factory=Counter)
    broken: list[str] = []


class World:
    """One run under one rule. `one_batch_at_a_time`: a batch's groups open only when those of the one before closed."""

    def __init__(
        self,
        config: RunConfig,
        durations: Durations,
        nature: Nature = Nature(),
        *,
        batcher: type[Batcher] = Batcher,
        bound: int | None = None,
        one_batch_at_a_time: bool = False,
        keep_facts: bool = False,
    ) -> None:
        self.config, self.nature = config, nature
        self.tally = Tally()
        self.now = 0.0
        self._durations = durations
        self._rng = random.Random(nature.seed)
        self._make_batcher = batcher
        self._bound = config.pacing.max_lag if bound is None else bound
        self._serial = one_batch_at_a_time
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ids = itertools.count()
        self._told: dict[str, list[tuple[float, Fact | Header]]] = {kind: [] for kind in KINDS}
        self._keep = keep_facts or nature.restarts > 0
        self._served_at: list[float] = []
        self._served: list[int] = []
        self._version = 0
        self._training = False
        self._incarnation = 0
        self._wake_at = float("inf")
        self._retries: set[float] = set()
        self._open: dict[str, GroupOpened] = {}
        self._closed_ordinals = 0
        self._drawn: dict[tuple[str, int], list[float]] = {}
        self._ran: dict[str, float] = {}
        self._fate: dict[str, str] = {}
        self._snapshot: tuple[bytes, dict[str, int]] | None = None
        self.core = self._new_core(None)
        self.batcher = self._new_batcher(None)
        pacing = config.pacing
        ends = config.run.steps * pacing.groups_per_step * pacing.group_size
        self._restart_at = {self._rng.randrange(ends) for _ in range(nature.restarts)}
        self._ends = 0

    # The run.

    def run(self) -> Tally:
        text, digest = canonical(self.config)
        self._tell(RunSubmitted(run=RUN, generation=0, config=text, config_digest=digest))
        self._serve(0)
        self._settle()
        while self._events and not self._is_over():
            self.now, _, act = heapq.heappop(self._events)
            act()
            self._settle()
        self._check_end()
        return self.tally

    def facts(self, kind: str) -> list[tuple[float, Fact | Header]]:
        """What was told of a kind, with its time, where facts are kept."""
        return self._told[kind]

    def _is_over(self) -> bool:
        return self._version == self.config.run.steps and not self._open

    def _at(self, after_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + after_s, next(self._ids), act))

    def _settle(self) -> None:
        """Let scheduler and learner decide until neither has anything to say."""
        while self._pace() or self._learn():
            pass

    # The scheduler.

    def _pace(self) -> bool:
        any_decision = False
        while decisions := [one for one in self.core.due(self.now) if self._may(one)]:
            any_decision = True
            for decision in decisions:
                self._tell(decision)
                match decision:
                    case GroupOpened():
                        self._opened(decision)
                    case EpisodeRequested():
                        self._begin(decision)
                    case GroupClosed():
                        self._closed(decision)
        retry = self.core.next_due()
        if retry is not None and retry > self.now and retry not in self._retries:
            self._retries.add(retry)
            self._at(retry - self.now, lambda: None)
        return any_decision

    def _may(self, decision: Fact) -> bool:
        if not self._serial or not isinstance(decision, GroupOpened):
            return True
        size = self.config.pacing.groups_per_step
        return decision.ordinal // size <= self._closed_ordinals // size

    def _opened(self, group: GroupOpened) -> None:
        if group.group in self._open or group.group in self._fate:
            self.tally.broken.append(f"{self.now:.2f}: {group.group} opened twice")
        self._open[group.group] = group

    def _closed(self, group: GroupClosed) -> None:
        del self._open[group.group]
        self._closed_ordinals += 1

    # Agents and verifier.

    def _begin(self, request: EpisodeRequested) -> None:
        group = self._open[request.group]
        key = (request.group, request.attempt)
        if key not in self._drawn:
            self._drawn[key] = self._durations(group.ordinal, group.size, request.attempt)
        duration_s = self._drawn[key][int(request.episode.rpartition("-")[2])]
        began = self.now
        self.tally.episodes += 1
        self._at(self._lasts(duration_s), lambda: self._end(request, began))

    def _lasts(self, duration_s: float) -> float:
        """What an episode takes that begins now, where the engine has room for all."""
        return duration_s

    def _end(self, request: EpisodeRequested, began: float) -> None:
        duration_s = self.now - began
        self.tally.busy_s += duration_s
        self._ends += 1
        if self._ends in self._restart_at:
            self._at(0.0, self._rng.choice([self._lose_core, self._lose_batcher]))
        if self.nature.failing and self._rng.random() < self.nature.failing:
            reason = self._rng.choice([FailReason.SANDBOX_FAILED, FailReason.HOST_LOST, FailReason.ENGINE_FAILED])
            self._tell(EpisodeFailed(run=RUN, episode=request.episode, attempt=request.attempt, reason=reason))
            return
        versions = self._versions(began)
        tokens = sum(count.tokens for count in versions)
        self.tally.offered_episodes += 1
        self.tally.offered_s += duration_s
        self.tally.offered_tokens += tokens
        self._ran[request.episode] = began
        reward = float(self._rng.random() < 0.5)
        self._tell(_verdict(request, reward))
        self._tell(
            Header(
                episode=request.episode,
                group=request.group,
                attempt=request.attempt,
                env="shell",
                harness="mini",
                reward=reward,
                versions=versions,
                sampled_tokens=tokens,
                longest=tokens,
            ),
        )

    def _versions(self, began: float) -> tuple[VersionCount, ...]:
        """Tokens come evenly; each is of the version that was served then."""
        first, last = bisect_right(self._served_at, began) - 1, bisect_right(self._served_at, self.now) - 1
        edges = [began, *self._served_at[first + 1 : last + 1], self.now]
        counts = [max(1, round(TOKENS_PER_S * (end - start))) for start, end in itertools.pairwise(edges)]
        return tuple(VersionCount(self._served[first + i], tokens) for i, tokens in enumerate(counts))

    # The learner.

    def _learn(self) -> bool:
        if self._training:
            return False
        action = self.batcher.decide(self.now)
        match action:
            case Train():
                self._train(action)
                return False
            case Retire():
                self._retire(action)
                return True
            case Wait(until=float() as until) if until != self._wake_at:
                self._wake_at = until
                self._at(max(0.0, until - self.now), lambda: None)
        return False

    def _train(self, action: Train) -> None:
        self._check(action)
        self._training = True
        incarnation = self._incarnation
        took_s = self.nature.step_s * len(action.groups) / self.config.pacing.groups_per_step
        self._at(took_s, lambda: self._commit(action, incarnation))

    def _commit(self, action: Train, incarnation: int) -> None:
        if incarnation != self._incarnation:
            return  # that learner was lost before it could tell
        self._training = False
        self._count(action)
        fact = BatchTrained(
            run=RUN,
            version=action.base + 1,
            base=action.base,
            episodes=action.episodes,
            groups=action.groups,
            config_digest="d",
            lag=action.lag,
        )
        self._version = action.base + 1
        self.tally.ended_s = self.now
        self._tell(fact)
        self._at(self.nature.serve_s, lambda: self._serve(fact.version))
        if self._keep and fact.version % CHECKPOINT_EVERY == 0:
            self._checkpoint()

    def _serve(self, version: int) -> None:
        self._served_at.append(self.now)
        self._served.append(version)
        self._tell(
            PolicyServed(run=RUN, version=version, incarnation=0, engine="one", digest="d", probe_error=0.0),
        )

    def _retire(self, action: Retire) -> None:
        self._fate[action.group] = action.reason.value
        if self.config.pacing.staleness == "wait" and action.reason in (RetireReason.STALE, RetireReason.NOT_NEEDED):
            self.tally.broken.append(f"{self.now:.2f}: wait retired {action.group}: {action.reason}")
        for header in action.headers:
            self.tally.discarded_tokens += header.sampled_tokens
            self._tell(
                TrajectoryRetired(
                    run=RUN,
                    episode=header.episode,
                    group=action.group,
                    reason=action.reason,
                    version=action.version,
                    lag=action.lag,
                    sampled_tokens=header.sampled_tokens,
                ),
            )

    # Promises.

    def _check(self, action: Train) -> None:
        """The bound by what the world knows: which version was served when each trained episode began."""
        for group in action.groups:
            if self._fate.get(group) is not None:
                self.tally.broken.append(f"{self.now:.2f}: {group} taken after it was {self._fate[group]}")
        if self.config.pacing.staleness != "mask":
            oldest = min(self._version_at(self._ran[episode]) for episode in action.episodes)
            lag = action.base - oldest
        else:
            lag = action.lag
            if action.oldest_allowed < action.base - self._bound:
                self.tally.broken.append(f"{self.now:.2f}: tokens of version {action.oldest_allowed} unmasked")
        if action.base != self._version:
            self.tally.broken.append(f"{self.now:.2f}: a batch on version {action.base}, not {self._version}")
        if lag > self._bound:
            self.tally.broken.append(f"{self.now:.2f}: a batch that lags {lag}")

    def _version_at(self, at: float) -> int:
        return self._served[bisect_right(self._served_at, at) - 1]

    def _count(self, action: Train) -> None:
        tally = self.tally
        tally.batches += 1
        tally.trained_groups += len(action.groups)
        tally.trained_episodes += len(action.episodes)
        tally.trained_tokens += action.loss_tokens
        tally.masked_tokens += action.masked_tokens
        tally.lags.update({count.lag: count.tokens for count in action.lags})
        for group in action.groups:
            self._fate[group] = "trained"
        for episode in action.episodes:
            self._ran.pop(episode)

    def _check_end(self) -> None:
        if self._version != self.config.run.steps:
            self.tally.broken.append(f"stood still at version {self._version} of {self.config.run.steps}")
        if self._open:
            self.tally.broken.append(f"{len(self._open)} groups never closed")
        if held := self.batcher.held():
            self.tally.broken.append(f"{len(held)} verdicts neither trained nor retired")

    # Facts, and processes that are lost.

    def _tell(self, fact: Fact | Header) -> None:
        if self._keep:
            self._told[fact.kind if isinstance(fact, Fact) else "trajectory"].append((self.now, fact))
        if isinstance(fact, Fact):
            self.core.apply(fact, self.now)
        if isinstance(fact, GroupOpened | GroupClosed | Header | BatchTrained | TrajectoryRetired):
            self.batcher.apply(fact)

    def _new_core(self, known: Known | None) -> Core:
        core = Core(RUN, known)
        core.equip(Catalogue(tasks=("a", "b", "c"), env_kind="pipeline"))
        return core

    def _lose_core(self) -> None:
        if self._rng.random() < 0.5:
            self.core = self._new_core(Known.decode(self.core.known.encode()))
            return
        self.core = self._new_core(None)
        for at, fact in self._in_any_order(dict.fromkeys(self._told, 0)):
            if isinstance(fact, Fact):
                self.core.apply(fact, at)

    def _new_batcher(self, state: State | None) -> Batcher:
        pacing = self.config.pacing
        return self._make_batcher(
            Rules(
                steps=self.config.run.steps,
                groups_per_step=pacing.groups_per_step,
                groups_per_step_most=pacing.groups_per_step_most,
                max_lag=pacing.max_lag,
                staleness=pacing.staleness,
                wait_timeout_s=pacing.wait_timeout_s,
                dynamic_sampling=pacing.dynamic_sampling,
                refills_per_step=pacing.refills_per_step,
                row_tokens=10**9,
            ),
            state,
        )

    def _lose_batcher(self) -> None:
        """The step in the making is lost; half of the time a checkpoint of some moment before is left."""
        if self._snapshot is None or self._rng.random() < 0.3:
            state, cursors = State(), dict.fromkeys(self._told, 0)
        else:
            state, cursors = msgspec.msgpack.decode(self._snapshot[0], type=State), self._snapshot[1]
        self.batcher = self._new_batcher(state)
        for _, fact in self._in_any_order(cursors):
            if isinstance(fact, GroupOpened | GroupClosed | Header | BatchTrained | TrajectoryRetired):
                self.batcher.apply(fact)
        self._training = False
        self._incarnation += 1

    def _checkpoint(self) -> None:
        cursors = {kind: len(facts) for kind, facts in self._told.items()}
        self._snapshot = (msgspec.msgpack.encode(self.batcher.state), cursors)

    def _in_any_order(self, cursors: dict[str, int]) -> list[tuple[float, Fact | Header]]:
        """What was told after the cursors: in order within a kind, the kinds in any order."""
        left = {kind: facts[cursors[kind] :][::-1] for kind, facts in self._told.items()}
        order = [kind for kind, facts in left.items() for _ in facts]
        self._rng.shuffle(order)
        return [left[kind].pop() for kind in order]


def _verdict(request: EpisodeRequested, reward: float) -> TrajectoryVerified:
    return TrajectoryVerified(
        run=RUN,
        episode=request.episode,
        attempt=request.attempt,
        group=request.group,
        purpose="train",
        task=request.task,
        harness="mini",
        sequences=(),
        temperature=1.0,
        reward=reward,
        ended=EndReason.FINISHED,
    )
