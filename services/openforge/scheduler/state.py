"""What the scheduler knows of one run: a fold of facts.

Promises: facts may come in any order between kinds, and twice; what is known afterwards is the same.
A group's slots are forgotten when it closes, so the state stays small.
"""

from typing import Self

import msgspec

from openforge.protos import (
    BatchTrained,
    EngineMeasured,
    EpisodeFailed,
    EpisodeRequested,
    Fact,
    FailReason,
    GroupClosed,
    GroupOpened,
    PolicyServed,
    RetireReason,
    RunPaused,
    RunStopped,
    RunSubmitted,
    TrajectoryRetired,
    TrajectoryVerified,
)
from openforge.runs.names import group_of
from openforge.runs.pressure import Pressure
from openforge.runs.state import RunState

FEWEST_TO_COMPARE = 2


class Failure(msgspec.Struct, frozen=True):
    reason: FailReason
    at: float


class Slot(msgspec.Struct):
    """One episode: the newest attempt that was requested, those that failed, the one with a verdict."""

    requested: int = -1
    requested_at: float = 0.0
    failures: dict[int, Failure] = {}
    verdict: int | None = None

    @property
    def is_open(self) -> bool:
        """An attempt is on its way and has neither verdict nor failure."""
        return self.requested >= 0 and self.verdict is None and self.requested not in self.failures

    def failure(self) -> Failure | None:
        """How the newest attempt failed."""
        return self.failures.get(self.requested)


class Served(msgspec.Struct, frozen=True):
    engine: str
    version: int


class Known(msgspec.Struct):
    """The fold. `live` counts training groups that were opened and are neither retired nor failed."""

    run: RunState = RunState()
    open: dict[str, GroupOpened] = {}
    closed: set[str] = set()
    slots: dict[str, Slot] = {}
    train_opened: int = 0
    live: int = 0
    gone: set[str] = set()
    same_rewards: dict[int, set[str]] = {}
    barren: int = 0
    evals_opened: dict[int, int] = {}
    evals_closed: dict[int, int] = {}
    trained: int = 0
    trained_groups: int = 0
    served: list[Served] = []
    pressure: Pressure = Pressure()

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        return msgspec.msgpack.decode(data, type=cls)

    def apply(self, fact: Fact, at: float) -> None:
        """Fold one fact, told at Unix time `at`."""
        match fact:
            case RunSubmitted() | RunPaused() | RunStopped():
                self._run_changed(self.run.after(fact))
            case GroupOpened():
                self._group_opened(fact)
            case GroupClosed():
                self._group_closed(fact)
            case EpisodeRequested():
                self._requested(fact, at)
            case EpisodeFailed():
                self._failed(fact, at)
            case TrajectoryVerified():
                self._verified(fact)
            case BatchTrained():
                self.trained_groups += len(fact.groups) if fact.version > self.trained else 0
                self.trained = max(self.trained, fact.version)
                self.same_rewards = {v: groups for v, groups in self.same_rewards.items() if v >= self.trained}
            case TrajectoryRetired():
                self._retired(fact)
            case PolicyServed():
                self.served = [known for known in self.served if known.engine != fact.engine]
                self.served.append(Served(fact.engine, fact.version))
            case EngineMeasured():
                self.pressure = self.pressure.after(fact)

    def _run_changed(self, run: RunState) -> None:
        if run.generation > self.run.generation:
            self.barren = 0
        self.run = run

    def _group_opened(self, fact: GroupOpened) -> None:
        if fact.group in self.open or fact.group in self.closed:
            return
        self.open[fact.group] = fact
        if fact.purpose == "eval":
            self.evals_opened[fact.start_version] = self.evals_opened.get(fact.start_version, 0) + 1
            return
        self.train_opened += 1
        self.live += fact.group not in self.gone

    def _group_closed(self, fact: GroupClosed) -> None:
        opened = self.open.pop(fact.group, None)
        if opened is None:
            return
        self.closed.add(fact.group)
        for member in fact.members:
            self.slots.pop(member.episode, None)
        verdicts = sum(member.failed is None for member in fact.members)
        self.barren = 0 if verdicts else self.barren + 1
        if opened.purpose == "eval":
            self.evals_closed[opened.start_version] = self.evals_closed.get(opened.start_version, 0) + 1
        elif verdicts < FEWEST_TO_COMPARE:
            self._leave(fact.group)

    def _slot(self, episode: str) -> Slot:
        """The slot, or one that nobody keeps where its group has closed."""
        if group_of(episode) in self.closed:
            return Slot()
        return self.slots.setdefault(episode, Slot())

    def _requested(self, fact: EpisodeRequested, at: float) -> None:
        slot = self._slot(fact.episode)
        if fact.attempt > slot.requested:
            slot.requested, slot.requested_at = fact.attempt, at

    def _failed(self, fact: EpisodeFailed, at: float) -> None:
        self._slot(fact.episode).failures.setdefault(fact.attempt, Failure(fact.reason, at))

    def _verified(self, fact: TrajectoryVerified) -> None:
        slot = self._slot(fact.episode)
        if slot.verdict is None:
            slot.verdict = fact.attempt

    def _retired(self, fact: TrajectoryRetired) -> None:
        if fact.reason is RetireReason.ZERO_VARIANCE and fact.group not in self.gone and fact.version >= self.trained:
            self.same_rewards.setdefault(fact.version, set()).add(fact.group)
        self._leave(fact.group)

    def _leave(self, group: str) -> None:
        """The group will never be trained: its place can be filled again."""
        if group in self.gone:
            return
        self.gone.add(group)
        self.live -= group in self.open or group in self.closed
