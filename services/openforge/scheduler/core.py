"""Decides what to open, what to try again and what to close; a fold of facts without clock or I/O.

Promises, whatever order the kinds of facts come in and however often the scheduler restarts:
- a training group opens only while waiting and running groups are fewer than the next max_lag + 1 batches after the
  served version hold, those of them that are not trained, and never more than the steps left hold;
- a retired or failed group is replaced by exactly one; groups retired for equal rewards by at most
  `refills_per_step` at each version;
- a group opens only if no more than `in_flight` slots are open with it, or fewer where the engines are pressed; each
  slot has one attempt open at a time;
- evaluation groups open only while no training group is open and their version is served;
- the same facts give the same decisions, byte for byte; a run that rests or is over opens nothing.

What a decision costs grows with what changed since the last one, not with what is open.
"""

from collections.abc import Iterator

import msgspec

from openforge.env.contract import HarnessKind
from openforge.protos import (
    EpisodeFailed,
    EpisodeLimits,
    EpisodeRequested,
    Fact,
    FailReason,
    GroupClosed,
    GroupOpened,
    Member,
    Purpose,
    TrajectoryRetired,
    TrajectoryVerified,
)
from openforge.runs.config import RunConfig
from openforge.runs.load import config_of
from openforge.runs.names import episode_of, eval_group, group_of, train_group
from openforge.scheduler.draw import drawn_task, sampling_seed
from openforge.scheduler.state import Known, Slot

Decision = GroupOpened | EpisodeRequested | GroupClosed

# The pauses before the second, third, later attempt: a service that died is back by the third.
RETRY_PAUSES_S = (1.0, 15.0, 60.0)
# So much later than its time-out an attempt is worth a line in the log.
OVERDUE_GRACE_S = 120.0
# Groups in a row without one verdict, in steps' worth of groups, before the scheduler only probes.
BARREN_STEPS = 2

_NOT_COUNTED = frozenset({FailReason.CANCELLED})  # somebody stopped the run: no fault of the slot's
_FINAL = frozenset({FailReason.UNTRUSTED_CLAIM})  # the next attempt would end the same way


class Catalogue(msgspec.Struct, frozen=True, kw_only=True):
    """What the environment offers to the run: its tasks, and how it hosts the harness."""

    tasks: tuple[str, ...]
    env_kind: HarnessKind


class Overdue(msgspec.Struct, frozen=True):
    """An attempt that should have ended long ago."""

    episode: str
    attempt: int
    age_s: float


class View(msgspec.Struct, frozen=True):
    """An open group at a glance: slots that are not done, and when each slot that waits for an attempt may have it."""

    unfinished: int
    requests: tuple[tuple[str, float], ...]


class Core:
    """One run. `engines` is how many engine processes serve at the same time."""

    def __init__(self, run: str, known: Known | None = None, *, engines: int = 1) -> None:
        self.run = run
        self.known = known or Known()
        self.catalogue: Catalogue | None = None
        self._engines = engines
        self._config: RunConfig | None = None
        self._views: dict[str, View] = {}
        self._closable: dict[str, None] = {}
        self._requesting: dict[str, None] = {}
        self._unfinished = 0
        self._places: dict[str, int] = {group: place for place, group in enumerate(self.known.open)}
        self._opened = len(self._places)
        self._touched: set[str] = set(self._places)

    @property
    def config(self) -> RunConfig | None:
        if self._config is None and self.known.run.config:
            self._config = config_of(self.known.run.config)
        return self._config

    def equip(self, catalogue: Catalogue) -> None:
        """Nothing is decided before this."""
        self.catalogue = catalogue

    def apply(self, fact: Fact, at: float = 0.0) -> None:
        self.known.apply(fact, at)
        match fact:
            case GroupOpened() | GroupClosed() | TrajectoryRetired():
                self._touch(fact.group)
            case EpisodeRequested() | EpisodeFailed() | TrajectoryVerified():
                self._touch(group_of(fact.episode))
            case _:
                pass

    def _touch(self, group: str) -> None:
        self._touched.add(group)
        if group in self.known.open and group not in self._places:
            self._places[group] = self._opened
            self._opened += 1

    def _look(self, config: RunConfig) -> None:
        """Bring the views up to date with what was touched."""
        for group in self._touched:
            old = self._views.pop(group, None)
            self._unfinished -= old.unfinished if old else 0
            self._closable.pop(group, None)
            self._requesting.pop(group, None)
            opened = self.known.open.get(group)
            if opened is None:
                self._places.pop(group, None)
                continue
            view = self._views[group] = self._view(config, opened)
            self._unfinished += view.unfinished
            if not view.unfinished:
                self._closable[group] = None
            if view.requests:
                self._requesting[group] = None
        self._touched.clear()

    def _view(self, config: RunConfig, opened: GroupOpened) -> View:
        unfinished = 0
        requests: list[tuple[str, float]] = []
        for member in range(opened.size):
            episode = episode_of(opened.group, member)
            slot = self.known.slots.get(episode) or Slot()
            if self._is_done(config, opened.group, slot):
                continue
            unfinished += 1
            if slot.requested < 0:
                requests.append((episode, float("-inf")))
            elif slot.failure() is not None:
                requests.append((episode, _retry_at(slot)))
        return View(unfinished, tuple(requests))

    def _in_order(self, groups: dict[str, None]) -> list[str]:
        """As they were opened."""
        return sorted(groups, key=self._places.__getitem__)

    def due(self, now: float) -> list[Decision]:
        """What has to be told at Unix time `now`. Empty once all of it was told and applied."""
        config, catalogue = self.config, self.catalogue
        if config is None or catalogue is None:
            return []
        self._look(config)
        closings: list[Decision] = [*self._closings()]
        if closings or self.known.run.phase != "submitted":
            return closings
        return [*self._requests(config, catalogue, now)] or [*self._openings(config, catalogue)]

    def next_due(self) -> float | None:
        """The Unix time at which the next retry is due, if any waits."""
        config = self.config
        if config is None or self.known.run.phase != "submitted":
            return None
        self._look(config)
        times = [at for group in self._requesting for _, at in self._views[group].requests if at > float("-inf")]
        return min(times, default=None)

    def served_version(self) -> int | None:
        """The oldest version among the engines that told last; None before the first."""
        return min((served.version for served in self.known.served[-self._engines :]), default=None)

    def slots_open(self) -> int:
        config = self.config
        if config is None:
            return 0
        self._look(config)
        return self._unfinished

    def slots_allowed(self) -> int:
        """How many slots may be open now."""
        return self.known.pressure.in_flight(self.config.pacing) if self.config is not None else 0

    def overdue(self, now: float) -> list[Overdue]:
        config = self.config
        if config is None:
            return []
        limit_s = config.environment.limits.timeout_s + OVERDUE_GRACE_S
        return [
            Overdue(episode, slot.requested, now - slot.requested_at)
            for _, episode, slot in self._slots()
            if slot.is_open and now - slot.requested_at > limit_s
        ]

    def is_probing(self) -> bool:
        """So many groups in a row ended without a verdict that only one is open at a time."""
        config = self.config
        return config is not None and self.known.barren >= BARREN_STEPS * config.pacing.groups_per_step

    def _slots(self) -> Iterator[tuple[str, str, Slot]]:
        """Group, episode and slot of every member of every open group."""
        for group, opened in self.known.open.items():
            for member in range(opened.size):
                episode = episode_of(group, member)
                yield group, episode, self.known.slots.get(episode) or Slot()

    def _is_done(self, config: RunConfig, group: str, slot: Slot) -> bool:
        if slot.verdict is not None:
            return True
        last = slot.failure()
        if last is None:
            return False
        counted = sum(failure.reason not in _NOT_COUNTED for failure in slot.failures.values())
        return counted >= config.pacing.attempts or last.reason in _FINAL or group in self.known.gone

    def _closings(self) -> Iterator[GroupClosed]:
        for group in self._in_order(self._closable):
            episodes = [episode_of(group, member) for member in range(self.known.open[group].size)]
            members = (_member(episode, self.known.slots[episode]) for episode in episodes)
            yield GroupClosed(run=self.run, group=group, members=tuple(members))

    def _requests(self, config: RunConfig, catalogue: Catalogue, now: float) -> Iterator[EpisodeRequested]:
        for group in self._in_order(self._requesting):
            for episode, at in self._views[group].requests:
                if at <= now:
                    attempt = (self.known.slots.get(episode) or Slot()).requested + 1
                    yield self._request(config, catalogue, self.known.open[group], episode, attempt)

    def _request(
        self, config: RunConfig, catalogue: Catalogue, group: GroupOpened, episode: str, attempt: int
    ) -> EpisodeRequested:
        limits = config.environment.limits
        return EpisodeRequested(
            run=self.run,
            episode=episode,
            attempt=attempt,
            group=group.group,
            purpose=group.purpose,
            task=group.task,
            harness=config.environment.harness,
            env_kind=catalogue.env_kind,
            limits=EpisodeLimits(
                timeout_s=limits.timeout_s,
                turns=limits.turns,
                tokens_per_turn=config.sampling.max_tokens,
                memory_mb=limits.memory_mb,
                pids=limits.pids,
                disk_mb=limits.disk_mb,
                cpus=limits.cpus,
            ),
            seed=sampling_seed(config.run.seed, episode, attempt),
        )

    def _openings(self, config: RunConfig, catalogue: Catalogue) -> Iterator[GroupOpened]:
        served = self.served_version()
        if served is None:
            return
        version = self._version_to_evaluate(config)
        if version is not None:
            yield from self._evals(config, catalogue, version, served)
        elif self.known.trained < config.run.steps:
            yield from self._training(config, catalogue, served)

    def _version_to_evaluate(self, config: RunConfig) -> int | None:
        """The version whose evaluation comes next and is not complete; None while training should go on."""
        evaluation, steps, trained = config.evaluation, config.run.steps, self.known.trained
        wanted = evaluation.heldout_episodes
        first = evaluation.before or (evaluation.after and steps == 0)
        if first and self.known.evals_closed.get(0, 0) < wanted:
            return 0
        if evaluation.after and trained >= steps > 0 and self.known.evals_closed.get(steps, 0) < wanted:
            return steps
        return None

    def _evals(self, config: RunConfig, catalogue: Catalogue, version: int, served: int) -> Iterator[GroupOpened]:
        if served < version or any(group.purpose == "train" for group in self.known.open.values()):
            return
        begin = self.known.evals_opened.get(version, 0)
        end = min(config.evaluation.heldout_episodes, begin + self._room(config, size=config.evaluation.trials))
        for ordinal in range(begin, end):
            yield self._open(config, catalogue, "eval", eval_group(version, ordinal), ordinal, version)

    def _training(self, config: RunConfig, catalogue: Catalogue, served: int) -> Iterator[GroupOpened]:
        pacing, known = config.pacing, self.known
        batches = min(pacing.max_lag + served + 1, config.run.steps) - known.trained
        untrained = known.live - max(known.trained_groups, known.trained * pacing.groups_per_step)
        # The next batch may be in the making, and nobody knows yet of how many groups: it counts as the least.
        room = (batches - 1) * pacing.most_groups_per_step() + pacing.groups_per_step
        allowed = room - untrained - self._held_back(config)
        begin = self.known.train_opened
        for ordinal in range(begin, begin + min(allowed, self._room(config, size=pacing.group_size))):
            yield self._open(config, catalogue, "train", train_group(ordinal), ordinal, served)

    def _held_back(self, config: RunConfig) -> int:
        """Groups retired for equal rewards that keep their place until the next version, since enough were refilled."""
        cap = config.pacing.refills_per_step
        return sum(max(0, len(groups) - cap) for groups in self.known.same_rewards.values())

    def _room(self, config: RunConfig, size: int) -> int:
        """How many groups of this size may open beside what is open."""
        if self.is_probing():
            return 0 if self.known.open else 1
        return max(0, self.slots_allowed() - self.slots_open()) // size

    def _open(
        self, config: RunConfig, catalogue: Catalogue, purpose: Purpose, group: str, ordinal: int, version: int
    ) -> GroupOpened:
        return GroupOpened(
            run=self.run,
            group=group,
            ordinal=ordinal,
            purpose=purpose,
            task=drawn_task(
                config.environment.name,
                catalogue.tasks,
                run_seed=config.run.seed,
                ordinal=ordinal,
                split="heldout" if purpose == "eval" else "train",
            ),
            size=config.evaluation.trials if purpose == "eval" else config.pacing.group_size,
            start_version=version,
        )


def _retry_at(slot: Slot) -> float:
    """When the slot may be tried again after the failure of its newest attempt."""
    failure = slot.failure()
    if failure is None:
        return 0.0
    return failure.at + RETRY_PAUSES_S[min(slot.requested, len(RETRY_PAUSES_S) - 1)]


def _member(episode: str, slot: Slot) -> Member:
    if slot.verdict is not None:
        return Member(episode=episode, attempt=slot.verdict)
    failure = slot.failure()
    return Member(episode=episode, attempt=slot.requested, failed=failure.reason if failure else None)
