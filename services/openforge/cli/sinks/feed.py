"""From facts to points and rows. Pure: a sink hears in the order in which the feed is told."""

from collections.abc import Mapping
from typing import Any

from openforge.bus import Told
from openforge.cli.sinks.contract import Sink
from openforge.protos import BatchTrained, TrajectoryVerified
from openforge.runs.names import eval_version


class Feed:
    """Held-out rewards become one point a version, of all its verdicts so far, when `settle` is called."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks
        self._heldout: dict[int, list[float]] = {}
        self._changed: dict[int, float] = {}

    def batch(self, told: Told[BatchTrained]) -> None:
        for sink in self._sinks:
            sink.point(told.fact.version, values_of(told.fact), told.at)

    def verdict(self, told: Told[TrajectoryVerified]) -> None:
        for sink in self._sinks:
            sink.episode(row_of(told))
        version = eval_version(told.fact.group)
        if version is not None:
            self._heldout.setdefault(version, []).append(told.fact.reward)
            self._changed[version] = told.at

    def settle(self) -> None:
        for version, at in self._changed.items():
            rewards = self._heldout[version]
            values = {"heldout/reward_mean": sum(rewards) / len(rewards), "heldout/episodes": float(len(rewards))}
            for sink in self._sinks:
                sink.point(version, values, at)
        self._changed = {}
        for sink in self._sinks:
            sink.flush()


def values_of(fact: BatchTrained) -> dict[str, float]:
    """What a batch says, by name."""
    return {
        "train/reward_mean": fact.reward_mean,
        "train/lag": float(fact.lag),
        "train/episodes": float(len(fact.episodes)),
        "train/loss_tokens": float(fact.loss_tokens),
        "train/trained_tokens": float(fact.trained_tokens),
        "train/step_s": fact.step_s,
        **{f"learner/{name}": value for name, value in fact.metrics.items()},
    }


def row_of(told: Told[TrajectoryVerified]) -> Mapping[str, Any]:
    fact = told.fact
    return {
        "run": fact.run,
        "episode": fact.episode,
        "attempt": fact.attempt,
        "purpose": fact.purpose,
        "env": fact.task.env,
        "task": fact.task.task,
        "harness": fact.harness,
        "reward": fact.reward,
        "ended": str(fact.ended),
        "turns": fact.turns,
        "sampled_tokens": fact.sampled_tokens,
        "oldest_version": fact.oldest_version(),
        "at": told.at,
    }
