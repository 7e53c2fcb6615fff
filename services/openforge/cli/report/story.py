"""What the streams say of a run, folded to what a reader wants to know.

Promises: a fold of facts in any interleaving of kinds; arrays of numbers are not kept, except the turns of
the episodes that the reader may open.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import Any

import msgspec

from openforge.bus import CAUGHT_UP, Bus
from openforge.protos import (
    BatchTrained,
    EpisodeEnded,
    EpisodeFailed,
    EpisodeRequested,
    Fact,
    FailReason,
    PolicyServed,
    RetireReason,
    RunSubmitted,
    TrajectoryRetired,
    TrajectoryVerified,
    TurnRecorded,
)
from openforge.runs.losses import Dependence, Slot, dependences

KINDS = ("run", "group", "episode", "turn", "trajectory", "policy")


class Episode(msgspec.Struct, kw_only=True):
    """One slot: its task, its attempts by how they ended, its verdict, its turns by attempt."""

    episode: str
    task: str
    harness: str
    purpose: str
    attempts: dict[int, str] = {}
    details: dict[int, str] = {}
    attempt: int | None = None
    reward: float | None = None
    ended: str = ""
    version: int | None = None
    sampled_tokens: int = 0
    trained_in: int | None = None
    retired: str = ""
    metrics: dict[str, float] = {}
    failed_tokens: dict[int, int] = {}
    turns: dict[int, list[TurnRecorded]] = {}


class Step(msgspec.Struct, kw_only=True):
    version: int
    at: float
    reward: float
    lag: int
    lags: dict[int, int]
    loss_tokens: int
    masked_tokens: int
    step_s: float
    metrics: dict[str, float]


class Story(msgspec.Struct, kw_only=True):
    run: str
    config: dict[str, Any] = {}
    steps: list[Step] = []
    episodes: dict[str, Episode] = {}
    ends: Counter[str] = msgspec.field(default_factory=Counter)
    failures: Counter[str] = msgspec.field(default_factory=Counter)
    retirements: Counter[str] = msgspec.field(default_factory=Counter)
    breaks: Counter[str] = msgspec.field(default_factory=Counter)
    dropped: Counter[str] = msgspec.field(default_factory=Counter)
    served: list[tuple[int, float]] = []
    keep_turns: int = 1500

    def apply(self, fact: Fact, at: float) -> None:
        match fact:
            case RunSubmitted():
                self.config = msgspec.json.decode(fact.config)
            case EpisodeRequested():
                self._episode(fact)
            case EpisodeEnded():
                self.ends[fact.reason] += 1
                self._known(fact.episode).attempts[fact.attempt] = str(fact.reason)
                self._known(fact.episode).details[fact.attempt] = fact.detail or fact.log_tail[-600:]
            case EpisodeFailed():
                self.failures[fact.reason] += 1
                self._known(fact.episode).attempts[fact.attempt] = f"failed: {fact.reason}"
                self._known(fact.episode).details[fact.attempt] = fact.detail
                if fact.reason is not FailReason.CANCELLED:
                    self._known(fact.episode).failed_tokens[fact.attempt] = fact.sampled_tokens
            case TurnRecorded():
                self._known(fact.episode).turns.setdefault(fact.attempt, []).append(fact)
            case TrajectoryVerified():
                self._verdict(fact)
            case BatchTrained():
                self._step(fact, at)
            case TrajectoryRetired():
                self.retirements[fact.reason] += 1
                self._known(fact.episode).retired = str(fact.reason)
            case PolicyServed():
                self.served.append((fact.version, at))

    def _known(self, episode: str) -> Episode:
        """The episode, even where another stream spoke of it first."""
        return self.episodes.setdefault(episode, Episode(episode=episode, task="?", harness="?", purpose="?"))

    def _episode(self, fact: EpisodeRequested) -> None:
        episode = self._known(fact.episode)
        episode.task, episode.harness, episode.purpose = fact.task.task, fact.harness, fact.purpose
        episode.attempts.setdefault(fact.attempt, "open")

    def _verdict(self, fact: TrajectoryVerified) -> None:
        episode = self._known(fact.episode)
        episode.attempt, episode.reward, episode.ended = fact.attempt, fact.reward, str(fact.ended)
        episode.version, episode.sampled_tokens = fact.oldest_version(), fact.sampled_tokens
        episode.metrics = fact.metrics
        self.breaks.update({str(cause): count for cause, count in fact.breaks.items()})
        self.dropped.update({dropped.reason: dropped.tokens for dropped in fact.dropped})

    def _step(self, fact: BatchTrained, at: float) -> None:
        for name in fact.episodes:
            self._known(name).trained_in = fact.version
        self.steps.append(
            Step(
                version=fact.version,
                at=at,
                reward=fact.reward_mean,
                lag=fact.lag,
                lags={lag.lag: lag.tokens for lag in fact.lags},
                loss_tokens=fact.loss_tokens,
                masked_tokens=fact.masked_tokens,
                step_s=fact.step_s,
                metrics=fact.metrics,
            )
        )

    def by_version(self, metric: str, purpose: str = "train") -> list[tuple[int, float]]:
        """The mean of a verdict's metric over the episodes of each weight version."""
        values: dict[int, list[float]] = defaultdict(list)
        for episode in self.episodes.values():
            if episode.purpose == purpose and episode.version is not None and metric in episode.metrics:
                values[episode.version].append(episode.metrics[metric])
        return [(version, fmean(values[version])) for version in sorted(values)]

    def metric_names(self) -> list[str]:
        return sorted({name for episode in self.episodes.values() for name in episode.metrics})

    def started_and_trained(self) -> list[tuple[str, str, int, int, int, int]]:
        """For each task and harness of training: slots started, trained, retired, failed for good or open."""
        rows: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        for episode in self.episodes.values():
            if episode.purpose != "train":
                continue
            row = rows[episode.task, episode.harness]
            row[0] += 1
            row[1 if episode.trained_in is not None else 2 if episode.retired else 3] += 1
        return [(task, harness, row[0], row[1], row[2], row[3]) for (task, harness), row in sorted(rows.items())]

    def staleness(self) -> list[tuple[str, str]]:
        """What the bound cost: tokens discarded and masked, the length of the discarded; the lags of the trained.

        A discarded episode is a verified one of training that was retired for whatever reason.
        """
        verified = [e for e in self.episodes.values() if e.purpose == "train" and e.reward is not None]
        discarded = [e.sampled_tokens for e in verified if e.retired]
        lags = Counter[int]()
        for step in self.steps:
            lags.update(step.lags)
        masked = sum(step.masked_tokens for step in self.steps)
        mean = _mean([e.sampled_tokens for e in verified])
        return [
            ("tokens discarded", _share(sum(discarded), sum(e.sampled_tokens for e in verified))),
            ("trained tokens masked", _share(masked, masked + sum(step.loss_tokens for step in self.steps))),
            (
                "length of the discarded over that of all",
                f"{_mean(discarded) / mean:.2f}" if discarded and mean else "-",
            ),
            *((f"loss tokens at lag {lag}", _share(tokens, lags.total())) for lag, tokens in sorted(lags.items())),
        ]

    def losses(self) -> tuple[Dependence, ...]:
        """Whether it depends on task, harness or length which attempts of training are lost.

        Lost are failed attempts, also those that another one replaced, and verdicts that were retired for another
        reason than that their group had nothing to compare. A cut-off attempt is as long as it became.
        """
        slots = [
            Slot(task=episode.task, harness=episode.harness, tokens=tokens, lost=lost)
            for _, episode in sorted(self.episodes.items())
            if episode.purpose == "train"
            for tokens, lost in _attempts(episode)
        ]
        return dependences(slots)

    def lengths(self) -> dict[str, float]:
        """Mean sampled tokens of verified and of trained training episodes: survivorship in one line."""
        verified = [e.sampled_tokens for e in self.episodes.values() if e.purpose == "train" and e.reward is not None]
        trained = [e.sampled_tokens for e in self.episodes.values() if e.trained_in is not None]
        return {"verified": _mean(verified), "trained": _mean(trained)}


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _attempts(episode: Episode) -> Iterator[tuple[int, bool]]:
    """Sampled tokens and whether it was lost, for each attempt that is over."""
    for tokens in episode.failed_tokens.values():
        yield tokens, True
    if episode.reward is not None:
        yield episode.sampled_tokens, episode.retired not in ("", str(RetireReason.ZERO_VARIANCE))


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return fmean(values) if values else 0.0


async def story_of(bus: Bus, run: str) -> Story:
    """Everything that the streams hold of `run` now."""
    story = Story(run=run)
    async for told in bus.follow(KINDS, run=run, until_now=True):
        if told is not CAUGHT_UP:
            story.apply(told.fact, told.at)
    story.steps.sort(key=lambda step: step.version)
    return story
