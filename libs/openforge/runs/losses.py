"""Whether what is lost depends on what it is: started against trained, with a test and weights that make up for it.

Promises: a pure function of counts and a seed; the alarm names the test, its p-value and the strata that lose most;
weights are those of inverse probability of completion, bounded, and their effective sample size is told beside them.

The test is Pearson's chi-squared statistic of the table strata x (kept, lost), its p-value by permutation (the labels
`lost` shuffled over the episodes, Phipson and Smyth 2010, arXiv 1603.05766: (b + 1) / (m + 1)), so that it holds for
few episodes and small strata too.
"""

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

PERMUTATIONS = 2_000
ALARM_P = 0.01
LEAST_PROBABILITY = 0.1


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of training that is over: it has a verdict, or is lost. `tokens` is what was sampled for it."""

    task: str
    harness: str
    tokens: int
    lost: bool


class Dependence(msgspec.Struct, frozen=True, kw_only=True):
    """How loss depends on one property. `weights` are 1 / P(kept | stratum), over their mean over the kept.

    `effective` is Kish's effective sample size of the kept under these weights. `p_value` is 1 where nothing or all
    is lost.
    """

    property: str
    test: str
    statistic: float
    p_value: float
    alarm: bool
    started: dict[str, int]
    lost: dict[str, int]
    weights: dict[str, float]
    effective: float

    def sentence(self) -> str:
        """The alarm, or that there is none, for a person."""
        worst = max(self.started, key=lambda name: self.lost.get(name, 0) / self.started[name], default="-")
        word = "depends" if self.alarm else "does not show to depend"
        at = f"{worst}: {self.lost.get(worst, 0)} of {self.started.get(worst, 0)} lost"
        return f"loss {word} on {self.property} ({self.test}, p = {self.p_value:.4f}); most at {at}"


def dependences(slots: Sequence[Slot], seed: int = 0) -> tuple[Dependence, ...]:
    """By task, harness and length. Nothing is said where nothing was started."""
    if not slots:
        return ()
    cuts = quartiles([slot.tokens for slot in slots])
    by = {
        "task": [slot.task for slot in slots],
        "harness": [slot.harness for slot in slots],
        "length": [length_bin(slot.tokens, cuts) for slot in slots],
    }
    return tuple(dependence(name, strata, [slot.lost for slot in slots], seed) for name, strata in by.items())


def dependence(name: str, strata: Sequence[str], lost: Sequence[bool], seed: int = 0) -> Dependence:
    """`strata` and `lost` are parallel, one entry for each episode."""
    started, gone = Counter(strata), Counter(s for s, is_lost in zip(strata, lost, strict=True) if is_lost)
    statistic = chi_squared(started, gone)
    p_value = _p_value(strata, lost, statistic, seed)
    kept = {stratum: count - gone[stratum] for stratum, count in started.items()}
    weights = completion_weights(started, kept)
    return Dependence(
        property=name,
        test=f"chi-squared by permutation, {PERMUTATIONS} draws",
        statistic=statistic,
        p_value=p_value,
        alarm=p_value < ALARM_P,
        started=dict(sorted(started.items())),
        lost={stratum: gone[stratum] for stratum in sorted(gone)},
        weights=weights,
        effective=_effective(kept, weights),
    )


def chi_squared(started: Mapping[str, int], lost: Mapping[str, int]) -> float:
    """Pearson's statistic of strata x (kept, lost); 0 where nothing or everything is lost."""
    total, gone = sum(started.values()), sum(lost.values())
    if gone in (0, total):
        return 0.0
    share = gone / total
    return sum(
        (lost.get(stratum, 0) - count * share) ** 2 / (count * share * (1 - share))
        for stratum, count in started.items()
    )


def completion_weights(started: Mapping[str, int], kept: Mapping[str, int]) -> dict[str, float]:
    """1 / max(P(kept | stratum), 0.1) of each stratum with a kept episode, scaled to a mean of 1 over the kept."""
    raw = {
        stratum: 1.0 / max(kept[stratum] / count, LEAST_PROBABILITY)
        for stratum, count in sorted(started.items())
        if kept.get(stratum, 0)
    }
    total = sum(kept[stratum] for stratum in raw)
    mean = sum(kept[stratum] * weight for stratum, weight in raw.items()) / total if total else 1.0
    return {stratum: weight / mean for stratum, weight in raw.items()}


def _p_value(strata: Sequence[str], lost: Sequence[bool], statistic: float, seed: int) -> float:
    gone = sum(lost)
    if gone in (0, len(lost)) or len(set(strata)) < 2:
        return 1.0
    rng, started = random.Random(seed), Counter(strata)
    as_far = sum(
        chi_squared(started, Counter(rng.sample(strata, gone))) >= statistic - 1e-9 for _ in range(PERMUTATIONS)
    )
    return (as_far + 1) / (PERMUTATIONS + 1)


def _effective(kept: Mapping[str, int], weights: Mapping[str, float]) -> float:
    first = sum(kept[stratum] * weight for stratum, weight in weights.items())
    second = sum(kept[stratum] * weight**2 for stratum, weight in weights.items())
    return first**2 / second if second else 0.0


def quartiles(tokens: Iterable[int]) -> tuple[int, ...]:
    """The inner cuts of four bins of about equal size; fewer where lengths repeat."""
    ordered = sorted(tokens)
    return tuple(sorted({ordered[len(ordered) * quarter // 4] for quarter in (1, 2, 3)}))


def length_bin(tokens: int, cuts: Sequence[int]) -> str:
    """`below 40`, `40 to 90`, `from 90`, in tokens."""
    below = [cut for cut in cuts if cut <= tokens]
    above = [cut for cut in cuts if cut > tokens]
    if not below:
        return f"below {above[0]}" if above else "any"
    return f"{below[-1]} to {above[0]}" if above else f"from {below[-1]}"
