"""The rules that are compared: ours, which run as they are shipped, and those that others published.

All open groups by the same admission, `(max_lag + version + 1) * B` groups that are neither trained nor gone and no
more episodes than slots, since AReaL's capacity and verl's warm-up batches are the same sum.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from openforge.cli.bench._world import Durations, Nature, Tally, World
from openforge.learner.batcher import Action, Batcher, Group, Rules, State, Wait
from openforge.learner.trajectories import Header
from openforge.runs import RunConfig

UNBOUNDED = 10**6


class Areal(Batcher):
    """Capacity alone bounds: min(max_concurrent - running, (eta + version + 1) * batch - (accepted + running)); what is
    finished is trained in the order in which it finished, however old it is.

    Source: inclusionAI/AReaL, areal/infra/staleness_manager.py (`StalenessManager.get_capacity`), and
    arXiv 2505.24298, equation 3.
    """

    def __init__(self, rules: Rules, state: State | None = None) -> None:
        super().__init__(msgspec.structs.replace(rules, staleness="drop", max_lag=UNBOUNDED), state)
        self._finished: dict[str, int] = {}

    def _oldest_first(self, name: str) -> tuple[int, int, str]:
        return (self._finished.setdefault(name, len(self._finished)), 0, name)


class VerlDrop(Batcher):
    """Finished prompts of age `global_step - start_step + 1 > max_off_policy_threshold` are evicted whole and refilled
    one for one; the oldest first. The threshold here is max_lag + 1, which is the same age.

    Source: verl-project/verl, verl/trainer/ppo/v1/replay_buffer.py (`_stale_terminal_keys`, `sample`).
    """

    def _stale(self, headers: list[Header]) -> bool:
        threshold = self.rules.max_lag + 1
        start = min(self.state.groups[header.group].start_version for header in headers)
        return self.version - start + 1 > threshold


class VerlWait(Batcher):
    """No batch while any prompt in flight has `global_step - start_step + 1 >= max_off_policy_threshold`; nothing is
    evicted; the oldest first. The threshold here is max_lag + 1.

    Source: verl-project/verl, verl/trainer/ppo/v1/replay_buffer.py (`_has_enough_samples`).
    """

    def __init__(self, rules: Rules, state: State | None = None) -> None:
        self._threshold = rules.max_lag + 1
        super().__init__(msgspec.structs.replace(rules, staleness="wait", max_lag=UNBOUNDED), state)

    def _hold(self, ready: list[str], now: float) -> Action | None:
        for group in self.state.groups.values():
            if self._is_in_flight(group) and self.version - group.start_version + 1 >= self._threshold:
                return Wait(why=f"group {group.name} is in flight at the threshold")
        return None

    def _is_in_flight(self, group: Group) -> bool:
        return group.opened and group.name not in self.state.fates and not group.complete()


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """Of a run: `slots` episodes at once, `steps` batches of `groups` groups of `members`."""

    slots: int
    groups: int = 8
    members: int = 8
    steps: int = 40

    @property
    def batch(self) -> int:
        return self.groups * self.members


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """`stretch`: `groups_per_step_most` over `groups_per_step`; `scale`: its batches over those of the others.
    `keeps_bound`: what it promises, so that a batch beyond is a violation; `lag`: its own max_lag where it has one."""

    name: str
    staleness: Literal["drop", "wait", "mask"] = "drop"
    batcher: type[Batcher] = Batcher
    stretch: int = 1
    lag: int | None = None
    one_batch_at_a_time: bool = False
    keeps_bound: bool = True
    scale: int = 1

    def sized(self, size: Size) -> Size:
        return msgspec.structs.replace(size, groups=size.groups * self.scale)


RULES = (
    Rule(name="synchronous", lag=0),
    Rule(name="one-step-off", lag=1, one_batch_at_a_time=True),
    Rule(name="drop"),
    Rule(name="wait", staleness="wait"),
    Rule(name="wait, batch up to 4x", staleness="wait", stretch=4),
    Rule(name="mask", staleness="mask"),
    Rule(name="areal", batcher=Areal, keeps_bound=False),
    Rule(name="areal, batch 4x", batcher=Areal, scale=4, keeps_bound=False),
    Rule(name="verl drop", batcher=VerlDrop),
    Rule(name="verl wait", staleness="wait", batcher=VerlWait, keeps_bound=False),
)


def config_of(rule: Rule, size: Size, max_lag: int, seed: int) -> RunConfig:
    said = {
        "run": {"name": "r", "steps": size.steps, "seed": seed},
        "model": {"path": "/m"},
        "environment": {"name": "shell", "harness": "mini"},
        "pacing": {
            "groups_per_step": size.groups,
            "groups_per_step_most": size.groups * rule.stretch if rule.stretch > 1 else 0,
            "group_size": size.members,
            "in_flight": size.slots,
            "max_lag": max_lag if rule.lag is None else rule.lag,
            "staleness": rule.staleness,
            "wait_timeout_s": 1e9,
        },
    }
    return msgspec.convert(said, RunConfig)


def tallied(rule: Rule, size: Size, max_lag: int, durations: Durations, nature: Nature) -> Tally:
    """One run of `rule` in virtual time."""
    return World(
        config_of(rule, size, max_lag, nature.seed),
        durations,
        nature,
        batcher=rule.batcher,
        bound=None if rule.keeps_bound else UNBOUNDED,
        one_batch_at_a_time=rule.one_batch_at_a_time,
    ).run()
