"""Every held-out episode of a run as one row: what was tried, by which harness, how it ended, what it earned.

Promises: a fold of facts in any order between kinds; an episode that failed for good is a row without reward.
"""

import msgspec

from openforge.bus import CAUGHT_UP, Bus
from openforge.protos import EpisodeFailed, EpisodeRequested, Fact, GroupClosed, TrajectoryVerified

FOLDED = ("group", "episode", "trajectory")


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One episode. `instance` names the drawn task, the same for each harness; `attempts` is how often it was tried.

    `passed` is what the checks said, or for a claim whether it is 1 or more; None where there is no verdict, and
    then `failed` says why. `version` is the oldest weight version that sampled for it; None where that is not known.
    """

    run: str
    harness: str
    task: str
    seed: int
    instance: str
    episode: str
    attempts: int
    passed: bool | None = None
    reward: float | None = None
    failed: str = ""
    ended: str = ""
    version: int | None = None
    turns: int = 0
    sampled_tokens: int = 0
    agent_s: float = 0.0
    metrics: dict[str, float] = {}


class Trials:
    """The fold."""

    def __init__(self) -> None:
        self._requested: dict[str, EpisodeRequested] = {}
        self._verdicts: dict[str, TrajectoryVerified] = {}
        self._failed: dict[str, str] = {}
        self._why: dict[tuple[str, int], EpisodeFailed] = {}

    def apply(self, fact: Fact) -> None:
        match fact:
            case EpisodeRequested(purpose="eval"):
                known = self._requested.get(fact.episode)
                if known is None or known.attempt < fact.attempt:
                    self._requested[fact.episode] = fact
            case TrajectoryVerified(purpose="eval"):
                self._verdicts[fact.episode] = fact
            case EpisodeFailed():
                self._why[fact.episode, fact.attempt] = fact
            case GroupClosed():
                self._failed |= {member.episode: str(member.failed) for member in fact.members if member.failed}

    def rows(self) -> list[Trial]:
        """All that were asked for, by name; those that are still open are left out."""
        rows = [self._row(self._requested[episode]) for episode in sorted(self._requested)]
        return [row for row in rows if row.failed or row.passed is not None]

    def failures(self) -> dict[str, int]:
        """Attempts without a verdict, by cause, those that were tried again included."""
        counted: dict[str, int] = {}
        for (episode, _), fact in sorted(self._why.items()):
            if episode in self._requested:
                counted[fact.reason] = counted.get(fact.reason, 0) + 1
        return counted

    def _row(self, asked: EpisodeRequested) -> Trial:
        row = Trial(
            run=asked.run,
            harness=asked.harness,
            task=asked.task.task,
            seed=asked.task.seed,
            instance=f"{asked.task.task}/{asked.task.seed}",
            episode=asked.episode,
            attempts=asked.attempt + 1,
            failed=self._failed.get(asked.episode, ""),
        )
        verdict = self._verdicts.get(asked.episode)
        return row if verdict is None else _with_verdict(row, verdict)


def _with_verdict(row: Trial, verdict: TrajectoryVerified) -> Trial:
    return msgspec.structs.replace(
        row,
        passed=bool(verdict.metrics.get("passed", float(verdict.reward >= 1.0))),
        reward=verdict.reward,
        failed="",
        ended=str(verdict.ended),
        version=verdict.oldest_version(),
        turns=verdict.turns,
        sampled_tokens=verdict.sampled_tokens,
        agent_s=verdict.agent_s,
        metrics=verdict.metrics,
    )


async def trials_of(bus: Bus, run: str) -> Trials:
    """The trials of everything that was told up to now."""
    trials = Trials()
    async for told in bus.follow(FOLDED, run=run, until_now=True):
        if told is not CAUGHT_UP:
            trials.apply(told.fact)
    return trials
