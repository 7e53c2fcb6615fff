"""What became of everything that was asked for: a fold of the streams, never a fact of its own.

Promises: requested = trained + retired + failed + in flight, in episodes and in sampled tokens, over
restarts of everything; each side is counted from other facts than the rest, so what was lost or counted
twice shows as a difference; every broken rule of the lineage is named.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

import msgspec

from openforge.bus import CAUGHT_UP, Bus
from openforge.protos import (
    BatchTrained,
    EndReason,
    EpisodeEnded,
    EpisodeFailed,
    EpisodeRequested,
    EpisodeSealed,
    Fact,
    FailReason,
    GroupClosed,
    GroupOpened,
    Purpose,
    RetireReason,
    RunSubmitted,
    TrajectoryRetired,
    TrajectoryVerified,
    TurnRecorded,
)
from openforge.runs.load import config_of
from openforge.runs.names import episode_of, eval_version, group_of

Attempt = tuple[str, int]

LATE = "late"
"""Why tokens are in no trajectory that were told after their attempt was sealed."""
FOLDED = ("run", "group", "episode", "turn", "trajectory", "policy")


class Tally(msgspec.Struct, frozen=True):
    """So many episodes, or attempts, and the tokens that were sampled in them."""

    episodes: int = 0
    tokens: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.episodes + other.episodes, self.tokens + other.tokens)


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """One purpose. Tokens told after their attempt was sealed are `late` in `dropped_tokens` and nowhere else.

    `done` is trained for training episodes, scored for held-out ones.

    Episodes are slots. The tokens of `failed` are those of all failed attempts, also in slots that a later
    attempt saved; `failed_attempts` has them by cause.
    """

    requested: Tally
    done: Tally
    retired: dict[RetireReason, Tally]
    failed: Tally
    in_flight: Tally
    failed_attempts: dict[FailReason, Tally]
    attempts: int
    ended: dict[EndReason, int]
    dropped_tokens: dict[str, int]

    @property
    def accounted(self) -> Tally:
        return sum(self.retired.values(), self.done + self.failed + self.in_flight)

    @property
    def missing(self) -> Tally:
        """Requested minus accounted for: zero in both, or the ledger does not close."""
        return Tally(self.requested.episodes - self.accounted.episodes, self.requested.tokens - self.accounted.tokens)


class Fate(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one kind of task, for the eye that looks for survivorship bias."""

    requested: int
    done: int
    retired: int
    failed: int
    mean_tokens_verified: float
    mean_tokens_done: float


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    closes: bool
    differences: tuple[str, ...]
    train: Account
    eval: Account
    versions: int
    lag_max: int
    max_lag: int
    by_task: dict[str, Fate]


class Books:
    """The fold. Facts may come in any order between kinds."""

    def __init__(self, run: str) -> None:
        self.run = run
        self._max_lag: int | None = None
        self._opened: dict[str, GroupOpened] = {}
        self._closed: dict[str, GroupClosed] = {}
        self._requested: dict[Attempt, EpisodeRequested] = {}
        self._ended: dict[Attempt, EndReason] = {}
        self._failed: dict[Attempt, EpisodeFailed] = {}
        self._verdicts: dict[str, _Verdict] = {}
        self._turn_tokens: Counter[Attempt] = Counter()
        self._unsealed: dict[Attempt, dict[int, int]] = defaultdict(dict)
        self._sealed: dict[Attempt, tuple[int, ...]] = {}
        self._late: Counter[Attempt] = Counter()
        self._batches: dict[int, BatchTrained] = {}
        self._retired: dict[str, TrajectoryRetired] = {}
        self._strays: list[str] = []

    def apply(self, fact: Fact) -> None:
        match fact:
            case RunSubmitted():
                self._max_lag = config_of(fact.config).pacing.max_lag
            case GroupOpened():
                self._opened[fact.group] = fact
            case GroupClosed():
                self._closed[fact.group] = fact
            case EpisodeRequested():
                self._requested[fact.episode, fact.attempt] = fact
            case EpisodeEnded():
                self._ended[fact.episode, fact.attempt] = fact.reason
            case EpisodeFailed():
                self._failed[fact.episode, fact.attempt] = fact
            case TurnRecorded():
                self._recorded(fact)
            case EpisodeSealed():
                self._seal(fact)
            case TrajectoryVerified():
                self._verified(fact)
            case BatchTrained():
                self._batches[fact.version] = fact
            case TrajectoryRetired():
                self._retired[fact.episode] = fact

    def _recorded(self, fact: TurnRecorded) -> None:
        attempt, tokens = (fact.episode, fact.attempt), fact.sampled_tokens()
        if attempt not in self._sealed:
            self._unsealed[attempt][fact.turn] = tokens
        late = attempt in self._sealed and fact.turn not in self._sealed[attempt]
        (self._late if late else self._turn_tokens)[attempt] += tokens

    def _seal(self, fact: EpisodeSealed) -> None:
        """A turn that another proxy told after the seal is nobody's work: its tokens are counted apart."""
        attempt = (fact.episode, fact.attempt)
        self._sealed[attempt] = fact.turns
        for turn, tokens in self._unsealed.pop(attempt, {}).items():
            if turn not in fact.turns:
                self._turn_tokens[attempt] -= tokens
                self._late[attempt] += tokens

    def _verified(self, fact: TrajectoryVerified) -> None:
        if fact.episode in self._verdicts:
            self._strays.append(f"episode {fact.episode} has two verdicts")
        self._verdicts[fact.episode] = _Verdict(
            fact.attempt, fact.sampled_tokens, {dropped.reason: dropped.tokens for dropped in fact.dropped}
        )

    def ledger(self) -> Ledger:
        train, evaluation = self._account("train"), self._account("eval")
        differences = [
            *self._strays,
            *_gaps("train", train),
            *_gaps("eval", evaluation),
            *self._attempt_differences(),
            *self._lineage_differences(),
            *self._group_differences(),
            *self._token_differences(),
        ]
        return Ledger(
            run=self.run,
            closes=not differences,
            differences=tuple(differences),
            train=train,
            eval=evaluation,
            versions=len(self._batches),
            lag_max=max((batch.lag for batch in self._batches.values()), default=0),
            max_lag=self._max_lag or 0,
            by_task=self._by_task(),
        )

    # The two sides of the account.

    def _account(self, purpose: Purpose) -> Account:
        slots = self._slots(purpose)
        attempts = [attempt for attempt in self._requested if self._purpose(attempt[0]) == purpose]
        failed_attempts: dict[FailReason, Tally] = defaultdict(Tally)
        for attempt, failure in self._failed.items():
            if self._purpose(attempt[0]) == purpose:
                failed_attempts[failure.reason] += Tally(1, self._tokens_of(attempt))
        failed_tokens = sum(tally.tokens for tally in failed_attempts.values())
        retired: dict[RetireReason, Tally] = defaultdict(Tally)
        for episode, fact in self._retired.items():
            if self._purpose(episode) == purpose:
                retired[fact.reason] += Tally(1, self._verdict_tokens(episode))
        done = [episode for episode in self._done(purpose) if self._purpose(episode) == purpose]
        return Account(
            requested=Tally(len(slots), self._sampled(purpose)),
            done=Tally(len(done), sum(self._verdict_tokens(episode) for episode in done)),
            retired=dict(retired),
            failed=Tally(sum(self._purpose(episode) == purpose for episode in self._given_up()), failed_tokens),
            in_flight=self._in_flight(slots, purpose),
            failed_attempts=dict(failed_attempts),
            attempts=len(attempts),
            ended=dict(Counter(why for attempt, why in self._ended.items() if self._purpose(attempt[0]) == purpose)),
            dropped_tokens=self._dropped(purpose),
        )

    def _slots(self, purpose: Purpose) -> list[str]:
        """Every slot that was opened or asked for."""
        slots = {
            episode_of(group, member): None
            for group, opened in self._opened.items()
            if opened.purpose == purpose
            for member in range(opened.size)
        }
        slots |= {episode: None for episode, _ in self._requested if self._purpose(episode) == purpose}
        return list(slots)

    def _sampled(self, purpose: Purpose) -> int:
        """All tokens that were sampled, from the turns themselves."""
        return sum(self._turn_tokens[attempt] for attempt in self._turn_tokens if self._purpose(attempt[0]) == purpose)

    def _done(self, purpose: Purpose) -> Iterable[str]:
        """The trained episodes, one for each time they were trained; for evaluation those with a verdict."""
        if purpose == "eval":
            return list(self._verdicts)
        return [episode for batch in self._batches.values() for episode in batch.episodes]

    def _given_up(self) -> list[str]:
        """The slots that failed for good."""
        return [member.episode for closed in self._closed.values() for member in closed.members if member.failed]

    def _in_flight(self, slots: list[str], purpose: Purpose) -> Tally:
        """Open slots, and verdicts that are neither trained nor retired, with the tokens of open attempts."""
        given_up, trained = set(self._given_up()), set(self._done("train"))
        settled = trained | self._retired.keys() if purpose == "train" else set(self._verdicts)
        waiting = [slot for slot in slots if slot not in given_up and slot not in settled]
        verified = {(episode, verdict.attempt) for episode, verdict in self._verdicts.items()}
        open_tokens = sum(
            tokens
            for attempt, tokens in self._turn_tokens.items()
            if self._purpose(attempt[0]) == purpose and attempt not in self._failed and attempt not in verified
        )
        return Tally(len(waiting), open_tokens + sum(self._verdict_tokens(slot) for slot in waiting))

    def _dropped(self, purpose: Purpose) -> dict[str, int]:
        dropped: Counter[str] = Counter()
        for episode, verdict in self._verdicts.items():
            if self._purpose(episode) == purpose:
                dropped.update(verdict.dropped)
        late = sum(tokens for attempt, tokens in self._late.items() if self._purpose(attempt[0]) == purpose)
        if late:
            dropped[LATE] += late
        return dict(dropped)

    def _purpose(self, episode: str) -> Purpose:
        opened = self._opened.get(group_of(episode))
        if opened is not None:
            return opened.purpose
        return "train" if eval_version(group_of(episode)) is None else "eval"

    def _verdict_tokens(self, episode: str) -> int:
        verdict = self._verdicts.get(episode)
        return verdict.tokens if verdict else 0

    def _tokens_of(self, attempt: Attempt) -> int:
        return self._turn_tokens.get(attempt, 0)

    # The rules.

    def _attempt_differences(self) -> Iterator[str]:
        for episode, attempt in self._requested:
            if group_of(episode) not in self._opened:
                yield f"episode {episode} was requested, but its group was never opened"
            if attempt and (episode, attempt - 1) not in self._failed:
                yield f"attempt {attempt} of episode {episode} was opened before attempt {attempt - 1} had failed"
        for episode, verdict in self._verdicts.items():
            if (episode, verdict.attempt) not in self._requested:
                yield f"attempt {verdict.attempt} of episode {episode} has a verdict, but was never requested"
            if (episode, verdict.attempt) in self._failed:
                yield f"attempt {verdict.attempt} of episode {episode} has a verdict and failed"
        for episode, attempt in self._failed:
            if (episode, attempt) not in self._requested:
                yield f"attempt {attempt} of episode {episode} failed, but was never requested"

    def _lineage_differences(self) -> Iterator[str]:
        trained_in: dict[str, int] = {}
        for place, version in enumerate(sorted(self._batches), start=1):
            batch = self._batches[version]
            if version != place or batch.base != version - 1:
                yield f"version {version} was computed at {batch.base}, but {place - 1} comes before it in the lineage"
            if self._max_lag is not None and batch.lag > self._max_lag:
                yield f"version {version} was trained at lag {batch.lag}, beyond max_lag = {self._max_lag}"
            for episode in batch.episodes:
                if episode in trained_in:
                    yield f"episode {episode} is in version {trained_in[episode]} and in version {version}"
                trained_in[episode] = version
                if episode not in self._verdicts:
                    yield f"episode {episode} was trained in version {version} without a verdict"
                if self._purpose(episode) == "eval":
                    yield f"held-out episode {episode} was trained in version {version}"
        for episode in self._retired:
            if episode in trained_in:
                yield f"episode {episode} was trained in version {trained_in[episode]} and retired"
            if episode not in self._verdicts:
                yield f"episode {episode} was retired without a verdict"

    def _group_differences(self) -> Iterator[str]:
        for group, closed in self._closed.items():
            for member in closed.members:
                verdict = self._verdicts.get(member.episode)
                if member.failed and verdict is not None:
                    yield f"episode {member.episode} failed for good, but has a verdict"
                if not member.failed and (verdict is None or verdict.attempt != member.attempt):
                    yield f"group {group} closed over {member.episode}, attempt {member.attempt}, without a verdict"
        for version, batch in self._batches.items():
            expected = {
                member.episode
                for group in batch.groups
                if group in self._closed
                for member in self._closed[group].members
                if not member.failed
            }
            for group in batch.groups:
                if group not in self._closed:
                    yield f"group {group} was trained in version {version} before it closed"
            for episode in sorted(expected ^ set(batch.episodes)):
                yield f"version {version} does not train exactly the verdicts of its groups: {episode}"

    def _token_differences(self) -> Iterator[str]:
        for episode, verdict in self._verdicts.items():
            recorded = self._tokens_of((episode, verdict.attempt))
            if recorded != verdict.tokens:
                yield f"episode {episode}: {recorded} tokens in its turns, {verdict.tokens} in its verdict"

    def _by_task(self) -> dict[str, Fate]:
        trained = set(self._done("train"))
        given_up = set(self._given_up())
        slots: dict[str, list[str]] = defaultdict(list)
        for episode in self._slots("train"):
            opened = self._opened.get(group_of(episode))
            slots[opened.task.task if opened else "?"].append(episode)
        return {
            task: Fate(
                requested=len(episodes),
                done=sum(episode in trained for episode in episodes),
                retired=sum(episode in self._retired for episode in episodes),
                failed=sum(episode in given_up for episode in episodes),
                mean_tokens_verified=_mean(self._verdicts[e].tokens for e in episodes if e in self._verdicts),
                mean_tokens_done=_mean(self._verdict_tokens(episode) for episode in episodes if episode in trained),
            )
            for task, episodes in sorted(slots.items())
        }


class _Verdict(msgspec.Struct, frozen=True):
    attempt: int
    tokens: int
    dropped: dict[str, int]


def _gaps(purpose: str, account: Account) -> Iterator[str]:
    missing = account.missing
    if missing.episodes:
        yield f"{purpose}: {missing.episodes} of {account.requested.episodes} requested episodes are not accounted for"
    if missing.tokens:
        yield f"{purpose}: {missing.tokens} of {account.requested.tokens} sampled tokens are not accounted for"


def _mean(values: Iterable[int]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0


async def ledger_of(bus: Bus, run: str) -> Ledger:
    """The ledger of everything that was told up to now."""
    books = Books(run)
    async for told in bus.follow(FOLDED, run=run, until_now=True):
        if told is not CAUGHT_UP:
            books.apply(told.fact)
    return books.ledger()
