"""Which groups make the next batch, and which never will.

State is a fold of facts: `GroupOpened`, `GroupClosed`, the headers of `TrajectoryVerified`, and the
learner's own `BatchTrained` and `TrajectoryRetired`. Facts of different streams may come in any order.

Promises: the lag of a batch (its base minus the oldest version over its unmasked loss tokens) never
exceeds `max_lag`; no trajectory is trained twice; a group is taken or retired whole; every verified
trajectory of a training group is trained, retired or still held here. No clock: `decide` is told the time.

The three modes. `drop` retires groups beyond the bound. `wait` holds the step until no running group
can be overtaken beyond the bound: after the oldest ready groups are taken, for every k = 0..max_lag at
most k batches of the rest may be as old as base + k - max_lag, and what the last step would leave behind counts
as that old; a group that blocks for too long is retired. `mask` takes every group and turns its tokens beyond
the bound into context. A batch is of `groups_per_step` groups, or of all that are ready up to `groups_per_step_most`.

What a decision costs grows with the open groups, and looks at the members of those only that changed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from typing import Literal

import msgspec

from openforge.learner.advantage import zero_variance
from openforge.learner.trajectories import Header
from openforge.protos import BatchTrained, GroupClosed, GroupOpened, LagCount, Member, RetireReason, TrajectoryRetired

Staleness = Literal["drop", "wait", "mask"]


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    steps: int
    groups_per_step: int
    max_lag: int
    staleness: Staleness
    wait_timeout_s: float
    dynamic_sampling: bool
    refills_per_step: int
    row_tokens: int
    groups_per_step_most: int = 0

    @property
    def most(self) -> int:
        return self.groups_per_step_most or self.groups_per_step


class Train(msgspec.Struct, frozen=True, kw_only=True):
    """Compute batch `base` -> `base` + 1 on these members, in this order. Tokens older than
    `oldest_allowed` are context."""

    base: int
    groups: tuple[str, ...]
    episodes: tuple[str, ...]
    oldest_allowed: int
    lag: int
    lags: tuple[LagCount, ...]
    loss_tokens: int
    masked_tokens: int


class Retire(msgspec.Struct, frozen=True, kw_only=True):
    """Tell `TrajectoryRetired` for each of these."""

    group: str
    headers: tuple[Header, ...]
    reason: RetireReason
    version: int
    lag: int = 0
    detail: str = ""


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing to do until a fact comes, or until the time `until`. `why` is one phrase for the log."""

    why: str
    until: float | None = None


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """All steps are trained and nothing verified is held."""


Action = Train | Retire | Wait | Done


FEWEST_TO_COMPARE = 2

TRAINED = "trained"
"""The fate of a group that was trained; a retired group's fate is its reason."""


class Group(msgspec.Struct, kw_only=True):
    """A group whose fate is open, or that holds verdicts which came after its fate."""

    name: str
    opened: bool = False
    ordinal: int = 0
    start_version: int = 0
    members: tuple[Member, ...] | None = None
    headers: dict[str, Header] = {}

    def with_verdict(self) -> list[str]:
        return [member.episode for member in self.members or () if member.failed is None]

    def complete(self) -> bool:
        """Opened and closed, and every verdict that the closing names is here."""
        return self.opened and self.members is not None and all(name in self.headers for name in self.with_verdict())

    def trainable(self) -> list[Header]:
        """In the order of the members."""
        return [self.headers[episode] for episode in self.with_verdict()]

    def versions(self) -> set[int]:
        return {count.version for header in self.headers.values() for count in header.versions}

    def age_version(self) -> int:
        """The oldest version that a token of it can have: the lower bound is its start while it runs."""
        known = self.versions()
        return min(known) if known and self.complete() else min(known | {self.start_version})


class View(msgspec.Struct, frozen=True):
    """A group at a glance. `oldest` and `youngest` are versions; `suspect`: it may never be trained, whatever comes."""

    complete: bool
    oldest: int
    youngest: int
    ordinal: int
    suspect: bool = False


class State(msgspec.Struct, kw_only=True):
    """All that the fold remembers. `awaited`: episodes whose fate was read before their verdict was."""

    version: int = 0
    groups: dict[str, Group] = {}
    fates: dict[str, str] = {}
    awaited: set[str] = set()
    filtered_at: int = 0
    filtered: set[str] = set()


class BoundBroken(AssertionError):
    """A batch would exceed the bound: a bug here, never to be trained."""


class Batcher:
    def __init__(self, rules: Rules, state: State | None = None) -> None:
        self.rules = rules
        self.state = state or State()
        self._blocking_since: dict[str, float] = {}
        self._views: dict[str, View] = {}
        self._fated: set[str] = set()
        self._touched: set[str] = set(self.state.groups)

    @property
    def version(self) -> int:
        return self.state.version

    def held(self) -> dict[str, Header]:
        """Every verified trajectory that is neither trained nor retired."""
        return {name: header for group in self.state.groups.values() for name, header in group.headers.items()}

    def holds(self, episode: str, group: str) -> bool:
        return group in self.state.groups and episode in self.state.groups[group].headers

    def apply(self, fact: GroupOpened | GroupClosed | Header | BatchTrained | TrajectoryRetired) -> None:
        """Fold one fact; each fact is folded once."""
        match fact:
            case GroupOpened():
                self._opened(fact)
            case GroupClosed():
                self._closed(fact)
            case Header():
                self._verified(fact)
            case BatchTrained():
                self._trained(fact)
            case TrajectoryRetired():
                self._retired(fact)

    def _opened(self, fact: GroupOpened) -> None:
        if fact.purpose != "train" or fact.group in self.state.fates:
            return
        group = self._group(fact.group)
        group.opened = True
        group.ordinal = fact.ordinal
        group.start_version = fact.start_version

    def _closed(self, fact: GroupClosed) -> None:
        group = self.state.groups.get(fact.group)
        if group is not None and group.opened:
            self._group(fact.group).members = fact.members

    def _verified(self, header: Header) -> None:
        if header.episode in self.state.awaited:
            self.state.awaited.discard(header.episode)
        else:
            self._group(header.group).headers[header.episode] = header

    def _trained(self, fact: BatchTrained) -> None:
        if fact.version <= self.state.version:
            return
        self.state.version = fact.version
        held = {episode: name for name in fact.groups for episode in self._group(name).headers}
        for episode in fact.episodes:
            self._take(episode, held.get(episode))
        for name in fact.groups:
            self._settle(name, TRAINED)

    def _retired(self, fact: TrajectoryRetired) -> None:
        held = fact.episode in self._group(fact.group).headers
        self._take(fact.episode, fact.group if held else None)
        if fact.reason is RetireReason.ZERO_VARIANCE:
            self._count_filtered(fact.group, fact.version)
        self._settle(fact.group, self.state.fates.get(fact.group, fact.reason.value))

    def _group(self, name: str) -> Group:
        """The group, to be changed."""
        self._touched.add(name)
        if name not in self.state.groups:
            self.state.groups[name] = Group(name=name)
        return self.state.groups[name]

    def _take(self, episode: str, group: str | None) -> None:
        if group is None:
            self.state.awaited.add(episode)
        else:
            del self._group(group).headers[episode]

    def _settle(self, name: str, fate: str) -> None:
        self.state.fates[name] = fate
        if not self._group(name).headers:
            del self.state.groups[name]

    def _count_filtered(self, group: str, version: int) -> None:
        if version > self.state.filtered_at:
            self.state.filtered_at, self.state.filtered = version, set()
        if version == self.state.filtered_at:
            self.state.filtered.add(group)

    def decide(self, now: float) -> Action:
        """What to do next. Remembers only since when a group keeps a batch waiting."""
        while (doomed := self._doomed()) is not None:
            if doomed.headers:
                return doomed
            self._settle(doomed.group, doomed.reason.value)
        if self.version >= self.rules.steps:
            return Done()
        ready = [name for name, view in self._views.items() if view.complete]
        if len(ready) < self.rules.groups_per_step:
            return Wait(why=f"{len(ready)} of {self.rules.groups_per_step} groups ready")
        ready.sort(key=self._oldest_first)
        if self.rules.staleness == "wait" and (action := self._hold(ready, now)) is not None:
            return action
        return self._train([self.state.groups[name] for name in ready[: self.rules.most]])

    def _oldest_first(self, name: str) -> tuple[int, int, str]:
        view = self._views[name]
        return (view.oldest, view.ordinal, name)

    def _look(self) -> None:
        """Bring the views up to date with what was touched."""
        for name in self._touched:
            self._views.pop(name, None)
            self._fated.discard(name)
            group = self.state.groups.get(name)
            if group is not None and name in self.state.fates:
                self._fated.add(name)
            elif group is not None and group.opened:
                self._views[name] = self._view(group)
        self._touched.clear()

    def _view(self, group: Group) -> View:
        oldest = group.age_version()
        if not group.complete():
            return View(False, oldest, oldest, group.ordinal)
        headers = group.trainable()
        youngest = max((header.versions[-1].version for header in headers if header.versions), default=oldest)
        suspect = (
            len(headers) < FEWEST_TO_COMPARE
            or any(header.unsound or header.longest > self.rules.row_tokens for header in headers)
            or (self.rules.dynamic_sampling and zero_variance([header.reward for header in headers]))
        )
        return View(True, oldest, youngest, group.ordinal, suspect)

    def _doomed(self) -> Retire | None:
        """The first group by name that will never be trained."""
        self._look()
        over = self.version >= self.rules.steps
        suspects = self._fated | (self.state.groups.keys() if over else self._suspects())
        for name in sorted(suspects):
            group, fate = self.state.groups[name], self.state.fates.get(name)
            if fate is not None:
                return self._late(group, fate)
            if over and group.headers:
                return self._retire(group, RetireReason.NOT_NEEDED)
            if group.complete() and (doom := self._doom(group)) is not None:
                return doom
        return None

    def _suspects(self) -> set[str]:
        version, mask, bound = self.version, self.rules.staleness == "mask", self.version - self.rules.max_lag
        return {
            name
            for name, view in self._views.items()
            if view.complete
            and (view.suspect or view.youngest > version or (view.youngest if mask else view.oldest) < bound)
        }

    def lost(self, name: str, why: str) -> Retire:
        """What a group of a batch needs is gone, so that the batch cannot be computed with it."""
        return self._retire(self.state.groups[name], RetireReason.LOST, detail=why)

    def _late(self, group: Group, fate: str) -> Retire:
        if fate == TRAINED:
            return self._retire(
                group, RetireReason.INVALID, detail="its slot had failed for good when its group was trained"
            )
        return self._retire(group, RetireReason(fate), detail="its group was retired before")

    def _retire(self, group: Group, reason: RetireReason, *, detail: str = "") -> Retire:
        known = group.versions()
        return Retire(
            group=group.name,
            headers=tuple(header for _, header in sorted(group.headers.items())),
            reason=reason,
            version=self.version,
            lag=max(0, self.version - min(known)) if known else 0,
            detail=detail,
        )

    def _doom(self, group: Group) -> Retire | None:
        """Why a complete group can never be trained, if so."""
        headers = group.trainable()
        if len(headers) < FEWEST_TO_COMPARE:
            return self._retire(
                group, RetireReason.TOO_FEW, detail=f"{len(headers)} of {len(group.members or ())} slots have a verdict"
            )
        if fault := self._fault(headers):
            return self._retire(group, RetireReason.INVALID, detail=fault)
        if (longest := max(header.longest for header in headers)) > self.rules.row_tokens:
            return self._retire(
                group, RetireReason.TOO_LONG, detail=f"{longest} tokens, learner.row_tokens = {self.rules.row_tokens}"
            )
        if self._stale(headers):
            return self._retire(group, RetireReason.STALE)
        if self._filters(group, headers):
            return self._retire(group, RetireReason.ZERO_VARIANCE)
        return None

    def _fault(self, headers: list[Header]) -> str:
        for header in headers:
            if header.unsound:
                return f"{header.episode}: {header.unsound}"
            if header.versions and header.versions[-1].version > self.version:
                return f"{header.episode}: sampled by version {header.versions[-1].version}, which was never trained"
        return ""

    def _stale(self, headers: list[Header]) -> bool:
        versions = {count.version for header in headers for count in header.versions}
        if not versions:
            return False
        decisive = max(versions) if self.rules.staleness == "mask" else min(versions)
        return self.version - decisive > self.rules.max_lag

    def _filters(self, group: Group, headers: list[Header]) -> bool:
        if not self.rules.dynamic_sampling or not zero_variance([header.reward for header in headers]):
            return False
        filtered = self.state.filtered if self.state.filtered_at == self.version else set()
        return group.name in filtered or len(filtered) < self.rules.refills_per_step

    def _hold(self, ready: list[str], now: float) -> Action | None:
        """Waits for running groups that the batch would leave too little time for, each up to its time-out."""
        blocking = self._blocking(ready[self.rules.most :])
        self._blocking_since = {name: self._blocking_since.get(name, now) for name in blocking}
        for name, since in self._blocking_since.items():
            if now - since >= self.rules.wait_timeout_s:
                return self._time_out(name, now)
        if not blocking:
            return None
        until = min(self._blocking_since.values()) + self.rules.wait_timeout_s
        return Wait(why=f"groups {', '.join(blocking)} must not be overtaken", until=until)

    def _blocking(self, rest: list[str]) -> list[str]:
        """Running groups that fail the deadline check. Where none of them runs, waiting would not help."""
        running = {name: view.oldest for name, view in self._views.items() if not view.complete}
        ages = sorted([*(self._views[name].oldest for name in rest), *running.values()])
        blocking: dict[str, None] = {}
        for k in range(min(self.rules.max_lag, self.rules.steps - 1 - self.version) + 1):
            last = self.version + k >= self.rules.steps - 1
            horizon = self.rules.steps if last else self.version + k - self.rules.max_lag
            if bisect_right(ages, horizon) > k * self.rules.most:
                blocking |= {name: None for name, oldest in running.items() if oldest <= horizon}
        return list(blocking)

    def _time_out(self, name: str, now: float) -> Action:
        group = self.state.groups[name]
        waited = f"{self.rules.wait_timeout_s:g} s"
        retire = self._retire(group, RetireReason.TIMED_OUT, detail=f"kept a batch waiting for {waited}")
        self.state.fates[name] = RetireReason.TIMED_OUT.value
        self._touched.add(name)
        if retire.headers:
            return retire
        del self.state.groups[name]
        return self.decide(now)

    def _train(self, batch: list[Group]) -> Train:
        oldest_allowed = self.version - self.rules.max_lag if self.rules.staleness == "mask" else 0
        counts = Counter[int]()
        for group in batch:
            for header in group.trainable():
                counts.update({count.version: count.tokens for count in header.versions})
        lags = {self.version - version: tokens for version, tokens in counts.items() if version >= oldest_allowed}
        lag = max(lags, default=0)
        if lag > self.rules.max_lag:
            raise BoundBroken(f"a batch at version {self.version} would lag {lag}, max_lag = {self.rules.max_lag}")
        return Train(
            base=self.version,
            groups=tuple(group.name for group in batch),
            episodes=tuple(header.episode for group in batch for header in group.trainable()),
            oldest_allowed=oldest_allowed,
            lag=lag,
            lags=tuple(LagCount(lag, tokens) for lag, tokens in sorted(lags.items())),
            loss_tokens=sum(lags.values()),
            masked_tokens=sum(counts.values()) - sum(lags.values()),
        )
