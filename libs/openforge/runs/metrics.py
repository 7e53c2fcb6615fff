"""What an operator asks of a run, in numbers: a fold of its facts.

Promises: the numbers come from the streams alone, so they are the same whoever exports them and survive every restart;
`METRICS` names all of them; times are the server's.

It answers: does it learn, how stale is it, who waits for whom, what is lost and why, what does a trained token cost.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import msgspec

from openforge.protos import (
    BatchTrained,
    EngineMeasured,
    EpisodeEnded,
    EpisodeFailed,
    EpisodeRequested,
    EpisodeSealed,
    EpisodeStarted,
    Fact,
    GroupClosed,
    PolicyServed,
    TrajectoryRetired,
    TrajectoryVerified,
    TurnRecorded,
)
from openforge.runs.ledger import Books
from openforge.runs.names import eval_version
from openforge.runs.progress import Progress

Stage = Literal["sandbox", "agent", "proxy", "verifier", "learner"]
STAGES: tuple[Stage, ...] = ("sandbox", "agent", "proxy", "verifier", "learner")
"""Whom an attempt waits for: a box, its agent, the seal, the verdict, the batch."""

ENOUGH = 20
"""Settled slots of a task or harness below which no share of losses is told."""


class Metric(msgspec.Struct, frozen=True):
    """`labels` come after `run`."""

    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()


METRICS: Mapping[str, Metric] = {
    # Is it learning?
    "openforge_trained_version": Metric("gauge", "Newest committed weight version, which is the number of batches."),
    "openforge_steps_wanted": Metric("gauge", "Batches that the run file asks for."),
    "openforge_reward_mean": Metric("gauge", "Mean reward of the newest batch."),
    "openforge_heldout_reward_mean": Metric("gauge", "Mean reward of held-out episodes at a version.", ("version",)),
    "openforge_batch_value": Metric("gauge", "What the learner says of the newest batch.", ("value",)),
    "openforge_batch_timestamp_seconds": Metric(
        "gauge", "When the newest batch was trained, training began or went on; absent before it began."
    ),
    "openforge_movement_timestamp_seconds": Metric("gauge", "When anything last came nearer to the end."),
    "openforge_no_progress_allowed_seconds": Metric("gauge", "run.no_progress_s of the run file."),
    "openforge_running": Metric("gauge", "1 while the run is submitted and not finished, else 0."),
    # How stale?
    "openforge_lag": Metric("gauge", "Lag of the newest batch."),
    "openforge_lag_allowed": Metric("gauge", "max_lag of the run file."),
    "openforge_loss_tokens": Metric("counter", "Trained tokens by how old they were.", ("lag",)),
    "openforge_published_version": Metric("gauge", "Newest published version."),
    "openforge_served_version": Metric("gauge", "Newest served version."),
    "openforge_weight_debt": Metric("gauge", "Trained minus served versions."),
    "openforge_served_timestamp_seconds": Metric("gauge", "When an engine last said that it serves a version."),
    # Who waits for whom?
    "openforge_in_flight_allowed": Metric("gauge", "Episodes that may be open, by the run file and the engines."),
    "openforge_engine_requests": Metric("gauge", "Requests of an engine, as it measured last.", ("engine", "state")),
    "openforge_engine_kv_use": Metric("gauge", "Share of an engine's memory for keys and values in use.", ("engine",)),
    "openforge_attempts": Metric("gauge", "Attempts by whom they wait for now.", ("stage",)),
    "openforge_oldest_attempt_timestamp_seconds": Metric(
        "gauge", "Since when the oldest of them waits; absent where none does.", ("stage",)
    ),
    "openforge_stage_seconds": Metric("counter", "Time that attempts spent waiting for each.", ("stage",)),
    "openforge_stage_attempts": Metric("counter", "Attempts that came through each.", ("stage",)),
    "openforge_engine_seconds": Metric("counter", "Time that turns waited for the engine.", ("part",)),
    "openforge_turns": Metric("counter", "Turns that were recorded."),
    "openforge_sampled_tokens": Metric("counter", "Tokens that were sampled."),
    "openforge_step_seconds": Metric("counter", "Time that the learner computed steps."),
    "openforge_groups_open": Metric("gauge", "Groups that are not closed."),
    # What is lost, and why?
    "openforge_episodes": Metric("counter", "Slots that were asked for."),
    "openforge_verified": Metric("counter", "Verdicts."),
    "openforge_failed_attempts": Metric("counter", "Attempts without a verdict.", ("reason",)),
    "openforge_retired": Metric("counter", "Verdicts that are never trained.", ("reason",)),
    "openforge_dropped_tokens": Metric("counter", "Sampled tokens that are not trained.", ("reason",)),
    "openforge_lost_share": Metric(
        "gauge",
        "Settled slots without a verdict, by task and by harness, where enough are settled.",
        ("dimension", "name"),
    ),
    "openforge_ledger_differences": Metric("gauge", "What the ledger cannot account for; 0 where it closes."),
    "openforge_dead_letters": Metric("gauge", "Messages that a service gave up.", ("service",)),
    # Does the engine say what the learner computes?
    "openforge_logprob_gap_mean": Metric("gauge", "Mean |log pi - log mu| of the newest batch."),
    "openforge_probe_error": Metric("gauge", "Largest log-prob difference when a version was loaded.", ("engine",)),
    # What does it cost?
    "openforge_cost_seconds_per_token": Metric("gauge", "Seconds of each service for a trained token.", ("of",)),
    "openforge_sampled_per_trained_token": Metric("gauge", "Sampled tokens for a trained one."),
}


class Sample(msgspec.Struct, frozen=True):
    """One number. `labels` in the order of its metric's, without `run`."""

    name: str
    value: float
    labels: tuple[str, ...] = ()


class RunMetrics:
    """The fold. Facts may come in any order between kinds."""

    def __init__(self, run: str) -> None:
        self.run = run
        self._progress = Progress()
        self._books = Books(run)
        self._queues = _Queues()
        self._losses = _Losses()
        self._engine_s: dict[str, float] = defaultdict(float)
        self._agent_s = self._verify_s = 0.0
        self._turns = self._tokens = 0
        self._lags: Counter[int] = Counter()
        self._batch: BatchTrained | None = None
        self._served_at = 0.0
        self._probe_errors: dict[str, float] = {}
        self._measured: dict[str, EngineMeasured] = {}

    def apply(self, fact: Fact, at: float) -> None:
        """Fold one fact, told at Unix time `at`."""
        self._progress.apply(fact, at)
        self._books.apply(fact)
        self._queues.apply(fact, at)
        self._losses.apply(fact)
        match fact:
            case TurnRecorded():
                self._turns += 1
                self._tokens += fact.sampled_tokens()
                self._engine_s["first_token"] += fact.timing.first_token_s
                self._engine_s["sampling"] += max(fact.timing.sampled_s - fact.timing.first_token_s, 0.0)
            case EpisodeEnded():
                self._agent_s += fact.wall_s
            case TrajectoryVerified():
                self._verify_s += fact.verify_s
            case BatchTrained():
                self._lags.update({lag.lag: lag.tokens for lag in fact.lags})
                if self._batch is None or fact.version > self._batch.version:
                    self._batch = fact
            case EngineMeasured():
                self._measured[fact.engine] = fact
            case PolicyServed():
                self._served_at = max(self._served_at, at)
                self._probe_errors[fact.engine] = fact.probe_error

    def samples(self) -> Iterator[Sample]:
        """Every number now, except dead letters, which are not a run's."""
        yield from self._learning()
        yield from self._staleness()
        yield from self._queues.samples()
        yield from self._work()
        yield from self._pressure()
        yield from self._lost()
        yield from self._cost()

    def _learning(self) -> Iterator[Sample]:
        progress, config = self._progress, self._progress.config
        running = progress.state.phase == "submitted" and not (config and progress.finished(config))
        yield Sample("openforge_running", float(running))
        yield Sample("openforge_trained_version", progress.trained)
        yield Sample("openforge_movement_timestamp_seconds", progress.last_movement_at)
        if config is not None:
            yield Sample("openforge_steps_wanted", config.run.steps)
            yield Sample("openforge_no_progress_allowed_seconds", config.run.no_progress_s)
        if progress.waits_for_batch_since:
            yield Sample("openforge_batch_timestamp_seconds", progress.waits_for_batch_since)
        for version, evaluation in progress.evaluations.items():
            yield Sample("openforge_heldout_reward_mean", evaluation.success, (str(version),))
        if self._batch is not None:
            yield Sample("openforge_reward_mean", self._batch.reward_mean)
            yield Sample("openforge_logprob_gap_mean", self._batch.metrics.get("gap_mean", 0.0))
            for name, value in self._batch.metrics.items():
                yield Sample("openforge_batch_value", value, (name,))

    def _staleness(self) -> Iterator[Sample]:
        progress = self._progress
        if self._batch is not None:
            yield Sample("openforge_lag", self._batch.lag)
        if progress.config is not None:
            yield Sample("openforge_lag_allowed", progress.config.pacing.max_lag)
        for lag, tokens in self._lags.items():
            yield Sample("openforge_loss_tokens", tokens, (str(lag),))
        if progress.published is not None:
            yield Sample("openforge_published_version", progress.published)
        if progress.served is not None:
            yield Sample("openforge_served_version", progress.served)
            yield Sample("openforge_served_timestamp_seconds", self._served_at)
            yield Sample("openforge_weight_debt", progress.trained - progress.served)
        for engine, error in self._probe_errors.items():
            yield Sample("openforge_probe_error", error, (engine,))

    def _work(self) -> Iterator[Sample]:
        yield Sample("openforge_turns", self._turns)
        yield Sample("openforge_sampled_tokens", self._tokens)
        yield Sample("openforge_step_seconds", sum(step.step_s for step in self._progress.steps))
        yield Sample("openforge_groups_open", self._progress.groups_open)
        for part, seconds in self._engine_s.items():
            yield Sample("openforge_engine_seconds", seconds, (part,))

    def _pressure(self) -> Iterator[Sample]:
        if self._progress.config is not None:
            yield Sample("openforge_in_flight_allowed", self._progress.in_flight_allowed)
        for engine, measured in self._measured.items():
            yield Sample("openforge_engine_requests", measured.running, (engine, "running"))
            yield Sample("openforge_engine_requests", measured.waiting, (engine, "waiting"))
            yield Sample("openforge_engine_kv_use", measured.kv_use, (engine,))

    def _lost(self) -> Iterator[Sample]:
        progress = self._progress
        yield Sample("openforge_episodes", progress.episodes_requested)
        yield Sample("openforge_verified", progress.episodes_verified)
        for failure, times in progress.failed_attempts.items():
            yield Sample("openforge_failed_attempts", times, (str(failure),))
        for why, times in progress.retired.items():
            yield Sample("openforge_retired", times, (str(why),))
        for reason, tokens in progress.dropped.items():
            yield Sample("openforge_dropped_tokens", tokens, (reason,))
        yield from self._losses.samples()
        yield Sample("openforge_ledger_differences", len(self._books.ledger().differences))

    def _cost(self) -> Iterator[Sample]:
        trained = sum(step.loss_tokens for step in self._progress.steps)
        if not trained:
            return
        yield Sample("openforge_sampled_per_trained_token", self._tokens / trained)
        seconds = {
            "engine": sum(self._engine_s.values()),
            "sandbox": self._agent_s,
            "verifier": self._verify_s,
            "learner": sum(step.step_s for step in self._progress.steps),
        }
        for service, spent_s in seconds.items():
            yield Sample("openforge_cost_seconds_per_token", spent_s / trained, (service,))


class _Queues:
    """Whom each attempt waits for, and for how long those before it did."""

    def __init__(self) -> None:
        self._waits: dict[tuple[str, int], tuple[Stage, float]] = {}
        self._settled: set[str] = set()
        self._over: set[tuple[str, int]] = set()
        self._seconds: dict[Stage, float] = defaultdict(float)
        self._through: Counter[Stage] = Counter()

    def apply(self, fact: Fact, at: float) -> None:
        match fact:
            case EpisodeRequested():
                self._enter(fact.episode, fact.attempt, "sandbox", at)
            case EpisodeStarted():
                self._enter(fact.episode, fact.attempt, "agent", at)
            case EpisodeEnded():
                self._enter(fact.episode, fact.attempt, "proxy", at)
            case EpisodeSealed():
                self._enter(fact.episode, fact.attempt, "verifier", at)
            case EpisodeFailed():
                self._leave((fact.episode, fact.attempt), at)
            case TrajectoryVerified() if fact.purpose == "train":
                self._enter(fact.episode, fact.attempt, "learner", at)
            case TrajectoryVerified():
                self._leave((fact.episode, fact.attempt), at)
            case BatchTrained():
                self._settle(fact.episodes, at)
            case TrajectoryRetired():
                self._settle((fact.episode,), at)

    def _enter(self, episode: str, attempt: int, stage: Stage, at: float) -> None:
        """Streams are read side by side: what comes late from another one moves nobody back."""
        key = (episode, attempt)
        known = self._waits.get(key)
        if (
            key in self._over
            or episode in self._settled
            or (known is not None and STAGES.index(known[0]) >= STAGES.index(stage))
        ):
            return
        self._count(key, at)
        self._waits[key] = (stage, at)

    def _leave(self, key: tuple[str, int], at: float) -> None:
        self._over.add(key)
        self._count(key, at)
        self._waits.pop(key, None)

    def _settle(self, episodes: Iterable[str], at: float) -> None:
        settled = set(episodes)
        self._settled |= settled
        for key in [key for key in self._waits if key[0] in settled]:
            self._leave(key, at)

    def _count(self, key: tuple[str, int], at: float) -> None:
        if (known := self._waits.get(key)) is not None:
            self._seconds[known[0]] += max(at - known[1], 0.0)
            self._through[known[0]] += 1

    def samples(self) -> Iterator[Sample]:
        waiting: dict[Stage, list[float]] = defaultdict(list)
        for stage, since in self._waits.values():
            waiting[stage].append(since)
        for stage in STAGES:
            yield Sample("openforge_attempts", len(waiting[stage]), (stage,))
            yield Sample("openforge_stage_seconds", self._seconds[stage], (stage,))
            yield Sample("openforge_stage_attempts", self._through[stage], (stage,))
            if waiting[stage]:
                yield Sample("openforge_oldest_attempt_timestamp_seconds", min(waiting[stage]), (stage,))


class _Losses:
    """Slots of closed training groups that have no verdict, by task and by harness."""

    def __init__(self) -> None:
        self._requests: dict[str, EpisodeRequested] = {}
        self._waiting: list[GroupClosed] = []
        self._settled: Counter[tuple[str, str]] = Counter()
        self._lost: Counter[tuple[str, str]] = Counter()

    def apply(self, fact: Fact) -> None:
        match fact:
            case EpisodeRequested() if fact.attempt == 0:
                self._requests[fact.episode] = fact
            case GroupClosed() if eval_version(fact.group) is None:
                self._waiting.append(fact)
        self._waiting = [closed for closed in self._waiting if not self._take(closed)]

    def _take(self, closed: GroupClosed) -> bool:
        """False while a request of the group has not been read yet."""
        if any(member.episode not in self._requests for member in closed.members):
            return False
        for member in closed.members:
            request = self._requests.pop(member.episode)
            for key in (("task", request.task.task), ("harness", request.harness)):
                self._settled[key] += 1
                self._lost[key] += member.failed is not None
        return True

    def samples(self) -> Iterator[Sample]:
        for key, settled in self._settled.items():
            if settled >= ENOUGH:
                yield Sample("openforge_lost_share", self._lost[key] / settled, key)
