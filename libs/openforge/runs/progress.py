"""How far a run is: a fold of its facts for the terminal, the watchdog and the summary.

Promises: times are the server's; movement is only what brings the run nearer to its end, so a run that
merely fails in circles stands still.
"""

from collections import Counter, deque

import msgspec

from openforge.protos import (
    BatchTrained,
    BranchCause,
    EngineMeasured,
    EpisodeFailed,
    EpisodeRequested,
    Fact,
    FailReason,
    GroupClosed,
    GroupOpened,
    PolicyPublished,
    PolicyServed,
    RetireReason,
    RunPaused,
    RunStopped,
    RunSubmitted,
    TrajectoryRetired,
    TrajectoryVerified,
)
from openforge.runs.config import RunConfig
from openforge.runs.load import config_of
from openforge.runs.names import eval_version
from openforge.runs.pressure import Pressure
from openforge.runs.state import RunState

SUBMITTED = "run submitted"
"""The movement that a submission is."""
FOLDED = ("run", "group", "episode", "trajectory", "policy")
RATE_WINDOW_S = 60.0
# Groups retired since the last step, in steps' worth of groups, that mean that no step will ever come.
CIRCLING_STEPS = 10


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One trained batch."""

    version: int
    at: float
    reward_mean: float
    lag: int
    loss_tokens: int
    step_s: float


class Evaluation(msgspec.Struct):
    """Held-out episodes at one version: rewards in 0..1, and how many failed for good."""

    rewards: list[float] = []
    failed: int = 0
    closed: int = 0

    @property
    def success(self) -> float:
        """The mean reward, which is the share of successes where rewards are 0 or 1."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else 0.0


class Progress:
    """The fold. Facts may come in any order between kinds."""

    def __init__(self) -> None:
        self.state = RunState()
        self.steps: list[Step] = []
        self.evaluations: dict[int, Evaluation] = {}
        self.retired: Counter[RetireReason] = Counter()
        self.failed_attempts: Counter[FailReason] = Counter()
        self.episodes_requested = 0
        self.episodes_verified = 0
        self.turns = 0
        self.tokens = 0
        self.published: int | None = None
        self.served: int | None = None
        self.pressure = Pressure()
        self.groups_open = 0
        self.barren_groups = 0
        self.last_movement_at = 0.0
        self.last_movement = "nothing yet"
        self.last_at = 0.0
        self.submitted_at = 0.0
        self.resumed_at = 0.0
        self.training_began_at = 0.0
        self._rested_at = 0.0
        self.rested_s = 0.0
        self._open: set[str] = set()
        self._settled: set[tuple[str, int]] = set()
        self._retired_groups: set[str] = set()
        self.sequences = 0
        self.tokens_verified = 0
        self.tokens_delivered = 0.0
        self.breaks: Counter[BranchCause] = Counter()
        self.dropped: Counter[str] = Counter()
        self._recent: deque[tuple[float, int]] = deque()

    @property
    def config(self) -> RunConfig | None:
        return config_of(self.state.config) if self.state.config else None

    @property
    def trained(self) -> int:
        """The newest committed version."""
        return max((step.version for step in self.steps), default=0)

    @property
    def in_flight(self) -> int:
        """Attempts that were asked for and have neither verdict nor failure."""
        return len(self._open)

    @property
    def in_flight_allowed(self) -> int:
        """How many episodes may be open now."""
        return self.pressure.in_flight(self.config.pacing) if self.config else 0

    @property
    def waits_for_batch_since(self) -> float:
        """Unix time; 0 before training began: evaluations at version 0 come first, and take what they take."""
        last = max((step.at for step in self.steps), default=self.training_began_at)
        return max(last, self.resumed_at) if last else 0.0

    @property
    def lag_max(self) -> int:
        return max((step.lag for step in self.steps), default=0)

    def tokens_per_s(self, now: float) -> float:
        """Sampled tokens of the attempts that ended within the last minute."""
        return sum(tokens for at, tokens in self._recent if at >= now - RATE_WINDOW_S) / RATE_WINDOW_S

    def finished(self, config: RunConfig) -> bool:
        """All steps trained, the last version served, all evaluations complete."""
        steps, evaluation = config.run.steps, config.evaluation
        if self.trained < steps or self.served is None or self.served < steps:
            return False
        versions = {0} if evaluation.before or (evaluation.after and steps == 0) else set()
        versions |= {steps} if evaluation.after else set()
        return all(self._closed_evaluations(version) >= evaluation.heldout_episodes for version in versions)

    def _closed_evaluations(self, version: int) -> int:
        evaluation = self.evaluations.get(version)
        return evaluation.closed if evaluation else 0

    def stuck(self, config: RunConfig, now: float) -> str | None:
        """Why the run will not end by itself, if it stands still or goes in circles; None while it moves."""
        if self.state.phase != "submitted" or self.finished(config):
            return None
        circling = CIRCLING_STEPS * config.pacing.groups_per_step
        if len(self._retired_groups) > circling:
            return (
                f"{len(self._retired_groups)} groups were retired since version {self.trained} was trained "
                f"({_counted(self.retired)} in all), so no batch ever fills"
            )
        still_s = now - self.last_movement_at
        if still_s <= config.run.no_progress_s:
            return None
        lost = f"; attempts failed so far: {_counted(self.failed_attempts)}" if self.failed_attempts else ""
        return f"nothing moved for {still_s:.0f} s since {self.last_movement!r} ({self.in_flight} in flight{lost})"

    def apply(self, fact: Fact, at: float) -> None:
        """Fold one fact, told at Unix time `at`."""
        self.last_at = max(self.last_at, at)
        match fact:
            case RunSubmitted() | RunPaused() | RunStopped():
                self._run_changed(fact, at)
            case GroupOpened():
                self._group_opened(fact, at)
            case GroupClosed():
                self._group_closed(fact, at)
            case EpisodeRequested():
                self._requested(fact)
            case EpisodeFailed():
                self._settle(fact.episode, fact.attempt)
                self.failed_attempts[fact.reason] += 1
                self._count_tokens(fact.sampled_tokens, at)
            case TrajectoryVerified():
                self._verified(fact, at)
            case TrajectoryRetired():
                self.retired[fact.reason] += 1
                self._retired_groups.add(fact.group)
            case BatchTrained():
                self._trained(fact, at)
            case PolicyPublished():
                if self.published is None or fact.version > self.published:
                    self._move(f"version {fact.version} published", at)
                self.published = fact.version
            case PolicyServed():
                if self.served is None or fact.version > self.served:
                    self._move(f"version {fact.version} served", at)
                self.served = fact.version
            case EngineMeasured():
                self.pressure = self.pressure.after(fact)

    def _run_changed(self, fact: Fact, at: float) -> None:
        self.state = self.state.after(fact)
        self.submitted_at = self.submitted_at or at
        if self.state.phase != "submitted":
            self._rested_at = self._rested_at or at
            return
        if self._rested_at and self.training_began_at:
            self.rested_s += at - self._rested_at
        self._rested_at = 0.0
        self.resumed_at = at
        self.barren_groups = 0
        self._move(SUBMITTED, at)

    def _group_opened(self, fact: GroupOpened, at: float) -> None:
        self.groups_open += 1
        if fact.purpose == "train" and not self.training_began_at:
            self.training_began_at = at

    def _group_closed(self, fact: GroupClosed, at: float) -> None:
        self.groups_open -= 1
        failed = sum(member.failed is not None for member in fact.members)
        has_verdict = failed < len(fact.members)
        self.barren_groups = 0 if has_verdict else self.barren_groups + 1
        version = eval_version(fact.group)
        if version is not None:
            evaluation = self._evaluation(version)
            evaluation.closed += 1
            evaluation.failed += failed
        if has_verdict:
            self._move(f"group {fact.group} closed", at)

    def _requested(self, fact: EpisodeRequested) -> None:
        self.episodes_requested += fact.attempt == 0
        if (fact.episode, fact.attempt) in self._settled:
            self._settled.discard((fact.episode, fact.attempt))
        else:
            self._open.add(f"{fact.episode}.{fact.attempt}")

    def _settle(self, episode: str, attempt: int) -> None:
        """The attempt is over, whether or not its request was folded yet."""
        name = f"{episode}.{attempt}"
        if name in self._open:
            self._open.discard(name)
        else:
            self._settled.add((episode, attempt))

    def _verified(self, fact: TrajectoryVerified, at: float) -> None:
        self._settle(fact.episode, fact.attempt)
        self.episodes_verified += 1
        self.turns += fact.turns
        self.sequences += len(fact.sequences)
        self.tokens_verified += fact.sampled_tokens
        self.tokens_delivered += fact.delivered_fraction * fact.sampled_tokens
        self.breaks.update(fact.breaks)
        self.dropped.update({dropped.reason: dropped.tokens for dropped in fact.dropped})
        self._count_tokens(fact.sampled_tokens, at)
        version = eval_version(fact.group)
        if version is not None:
            self._evaluation(version).rewards.append(min(max(fact.reward, 0.0), 1.0))
        self._move(f"episode {fact.episode} verified", at)

    def _count_tokens(self, tokens: int, at: float) -> None:
        self.tokens += tokens
        self._recent.append((at, tokens))
        while self._recent and self._recent[0][0] < at - RATE_WINDOW_S:
            self._recent.popleft()

    def _trained(self, fact: BatchTrained, at: float) -> None:
        self.steps.append(
            Step(
                version=fact.version,
                at=at,
                reward_mean=fact.reward_mean,
                lag=fact.lag,
                loss_tokens=fact.loss_tokens,
                step_s=fact.step_s,
            )
        )
        self._retired_groups.clear()
        self._move(f"version {fact.version} trained", at)

    def _evaluation(self, version: int) -> Evaluation:
        return self.evaluations.setdefault(version, Evaluation())

    def _move(self, what: str, at: float) -> None:
        if at >= self.last_movement_at:
            self.last_movement_at, self.last_movement = at, what


def _counted(counter: "Counter[RetireReason] | Counter[FailReason]") -> str:
    return ", ".join(f"{reason} {times}" for reason, times in counter.most_common())
