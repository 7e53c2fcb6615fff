"""The batch former against a small world with a scheduler, slow groups, failures and restarts."""

import random
from collections import Counter
from typing import Literal

import msgspec
import pytest
from batcher_facts import closed, header, name, opened, retired, rules, trained

from openforge.learner.batcher import Action, Batcher, Done, Retire, Rules, State, Train
from openforge.learner.trajectories import Header
from openforge.protos import BatchTrained, RetireReason, TrajectoryRetired


class World:
    """A scheduler that admits by the bound, groups of random length, a learner that is killed at random."""

    def __init__(self, seed: int, the_rules: Rules) -> None:
        self.rng = random.Random(seed)
        self.rules = the_rules
        self.size = self.rng.randint(2, 4)
        self.facts: dict[str, list[object]] = {"group": [], "trajectory": [], "policy": []}
        self.batcher = Batcher(the_rules)
        self.snapshot: tuple[bytes, dict[str, int]] = (msgspec.msgpack.encode(State()), dict.fromkeys(self.facts, 0))
        self.running: dict[int, dict[int, tuple[int, int]]] = {}
        self.failed: dict[int, list[int]] = {}
        self.admitted = 0
        self.gone = set[str]()
        self.now = 0.0
        self.trained: list[BatchTrained] = []
        self.headers: dict[str, Header] = {}
        self.folded = dict.fromkeys(self.facts, 0)

    def tell(self, kind: str, fact: object) -> None:
        self.facts[kind].append(fact)

    def catch_up(self) -> None:
        """Fold what was told, the kinds in any order."""
        while any(self.folded[kind] < len(self.facts[kind]) for kind in self.facts):
            kind = self.rng.choice([kind for kind in self.facts if self.folded[kind] < len(self.facts[kind])])
            self.batcher.apply(self.facts[kind][self.folded[kind]])  # type: ignore[arg-type]
            self.folded[kind] += 1

    def kill_learner(self) -> None:
        state, self.folded = self.snapshot[0], dict(self.snapshot[1])
        if self.rng.random() < 0.3:
            state, self.folded = msgspec.msgpack.encode(State()), dict.fromkeys(self.facts, 0)
        self.batcher = Batcher(self.rules, msgspec.msgpack.decode(state, type=State))

    def admit(self) -> None:
        start = max(0, len(self.trained) - (self.rng.random() < 0.2))
        live = self.admitted - len(self.gone)
        bound = min((self.rules.max_lag + start + 1) * self.rules.groups_per_step, self.total())
        if live < bound:
            self.tell("group", opened(self.admitted, start, self.size))
            slow = self.rng.random() < 0.2
            self.running[self.admitted] = {
                member: (start, self.rng.randint(1, 60 if slow else 6)) for member in range(self.size)
            }
            self.failed[self.admitted] = []
            self.admitted += 1

    def total(self) -> int:
        return self.rules.steps * self.rules.groups_per_step

    def work(self) -> None:
        """One running member takes a step; at its end it has a verdict or has failed."""
        if not self.running:
            return
        ordinal = self.rng.choice(list(self.running))
        members = self.running[ordinal]
        member = self.rng.choice(list(members))
        start, left = members[member]
        if left > 1:
            members[member] = (start, left - 1)
            return
        del members[member]
        if self.rng.random() < 0.1:
            self.failed[ordinal].append(member)
        else:
            self.verify(ordinal, member, start)
        if not members:
            del self.running[ordinal]
            self.tell("group", closed(ordinal, self.size, tuple(self.failed[ordinal])))
            if self.size - len(self.failed[ordinal]) == 0:
                self.gone.add(name(ordinal))

    def verify(self, ordinal: int, member: int, start: int) -> None:
        end = len(self.trained)
        versions = {self.rng.randint(start, end): self.rng.randint(1, 5) for _ in range(self.rng.randint(0, 3))}
        unsound = "nan" if self.rng.random() < 0.02 else ""
        reward = float(self.rng.random() < 0.3)
        one = header(ordinal, member, versions, reward, unsound=unsound)
        self.headers[one.episode] = one
        self.tell("trajectory", one)

    def learn(self) -> Action:
        self.catch_up()
        action = self.batcher.decide(self.now)
        match action:
            case Train():
                self.tell("policy", trained(action))
                self.trained.append(trained(action))
            case Retire():
                facts = retired(action)
                told = facts if self.rng.random() < 0.9 else facts[: self.rng.randint(0, len(facts))]
                self.gone.add(action.group)
                for fact in told:
                    self.tell("policy", fact)
                if len(told) < len(facts):
                    self.kill_learner()
        if self.rng.random() < 0.1:
            self.catch_up()
            self.snapshot = (msgspec.msgpack.encode(self.batcher.state), dict(self.folded))
        return action

    def run(self) -> None:
        for _ in range(30_000):
            self.now += 1.0
            self.admit()
            self.work()
            if isinstance(self.learn(), Done) and not self.running:
                break
            if self.rng.random() < 0.02:
                self.kill_learner()
                self.catch_up()
        self.catch_up()


@pytest.mark.parametrize("mode", ["drop", "wait", "mask"])
@pytest.mark.parametrize("seed", range(12))
def test_the_bound_and_the_ledger_hold_over_failures_and_restarts(
    mode: Literal["drop", "wait", "mask"], seed: int
) -> None:
    rng = random.Random(seed)
    world = World(
        seed,
        rules(
            mode,
            steps=rng.randint(5, 25),
            groups_per_step=rng.randint(1, 4),
            max_lag=rng.randint(0, 4),
            wait_timeout_s=rng.choice([30.0, 1e9]),
            dynamic_sampling=rng.random() < 0.3,
        ),
    )
    world.run()
    assert len(world.trained) == world.rules.steps, "the run ends"
    fates = Counter(episode for batch in world.trained for episode in batch.episodes)
    retirements = [fact for fact in world.facts["policy"] if isinstance(fact, TrajectoryRetired)]
    fates.update(fact.episode for fact in retirements)
    fates.update(world.batcher.held())
    assert fates == Counter(dict.fromkeys(world.headers, 1)), "each verdict has one fate"
    if mode == "wait" and world.rules.wait_timeout_s == 1e9:
        assert RetireReason.STALE not in {fact.reason for fact in retirements}, "waiting discards nothing"
    for batch in world.trained:
        assert batch.lag <= world.rules.max_lag
        versions = [count.version for episode in batch.episodes for count in world.headers[episode].versions]
        if mode == "mask":
            versions = [version for version in versions if version >= batch.base - world.rules.max_lag]
        assert batch.lag == batch.base - min(versions, default=batch.base)
