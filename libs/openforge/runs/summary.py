"""A run in numbers, for people and for `runs/<run>/summary.json`.

Promises: the same facts give the same summary, the bootstrap included.
"""

import random
from collections.abc import Sequence

import msgspec

from openforge.runs.config import RunConfig
from openforge.runs.ledger import Ledger
from openforge.runs.progress import Evaluation, Progress

BOOTSTRAP_DRAWS = 10_000


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """`runs/<run>/summary.json`. Rewards and successes are 0 where nothing was measured.

    `breaks` are turns that went on from no other, by cause; `dropped_tokens` the sampled tokens that are not
    trained, by reason.
    """

    steps: int
    reward_first_fifth: float
    reward_last_fifth: float
    success_heldout_before: float
    success_heldout_after: float
    success_heldout_after_low: float
    heldout_episodes: int
    episodes: int
    turns: int
    tokens: int
    delivered_fraction: float
    sequences_per_episode: float
    lag_max: int
    max_lag: int
    ledger_closes: bool
    train_s: float
    wall_s: float
    seed: int
    breaks: dict[str, int]
    dropped_tokens: dict[str, int]


def summary(progress: Progress, ledger: Ledger, config: RunConfig, *, wall_s: float | None = None) -> Summary:
    """`wall_s` is the whole command; where it is not known, from the first submission to the last fact."""
    rewards = [step.reward_mean for step in sorted(progress.steps, key=lambda step: step.version)]
    fifth = max(1, len(rewards) // 5)
    before = progress.evaluations.get(0, Evaluation())
    after = progress.evaluations.get(config.run.steps, Evaluation())
    trained_at = max((step.at for step in progress.steps), default=progress.training_began_at)
    return Summary(
        steps=len(progress.steps),
        reward_first_fifth=mean(rewards[:fifth]),
        reward_last_fifth=mean(rewards[-fifth:]),
        success_heldout_before=before.success,
        success_heldout_after=after.success,
        success_heldout_after_low=bootstrap(after.rewards)[0],
        heldout_episodes=len(after.rewards),
        episodes=progress.episodes_requested,
        turns=progress.turns,
        tokens=progress.tokens,
        delivered_fraction=progress.tokens_delivered / progress.tokens_verified if progress.tokens_verified else 1.0,
        sequences_per_episode=progress.sequences / progress.episodes_verified if progress.episodes_verified else 0.0,
        lag_max=progress.lag_max,
        max_lag=config.pacing.max_lag,
        ledger_closes=ledger.closes,
        train_s=max(0.0, trained_at - progress.training_began_at - progress.rested_s),
        wall_s=progress.last_at - progress.submitted_at if wall_s is None else wall_s,
        seed=config.run.seed,
        breaks={cause.value: progress.breaks[cause] for cause in sorted(progress.breaks)},
        dropped_tokens=dict(sorted(progress.dropped.items())),
    )


def bootstrap(values: Sequence[float], draws: int = BOOTSTRAP_DRAWS, seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of the mean: so many draws with replacement, the same ones every time."""
    if not values:
        return 0.0, 0.0
    rng = random.Random(seed)
    means = sorted(sum(rng.choices(values, k=len(values))) / len(values) for _ in range(draws))
    return means[int(0.025 * draws)], means[min(draws - 1, int(0.975 * draws))]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
