"""The batch former against a small world with a scheduler, slow groups, failures and restarts."""

import random
from collections import Counter
from typing import Literal

import msgspec
import pytest

from openforge.learner.batcher import Action, Batcher, Done, Retire, Rules, State, Train, Wait
from openforge.learner.trajectories import Header, VersionCount
from openforge.protos import (
    BatchTrained,
    FailReason,
    GroupClosed,
    GroupOpened,
    Member,
    RetireReason,
    TaskRef,
    TrajectoryRetired,
)

RUN = "run"
TASK = TaskRef(env="letters", task="t", seed=0)


def rules(staleness: Literal["drop", "wait", "mask"] = "drop", **changes: int | float | bool) -> Rules:
    defaults = Rules(
        steps=10,
        groups_per_step=2,
        max_lag=1,
        staleness=staleness,
        wait_timeout_s=60.0,
        dynamic_sampling=False,
        refills_per_step=2,
        row_tokens=100,
    )
    return msgspec.structs.replace(defaults, **changes)


def opened(ordinal: int, start: int = 0, size: int = 2) -> GroupOpened:
    return GroupOpened(
        run=RUN, group=name(ordinal), ordinal=ordinal, purpose="train", task=TASK, size=size, start_version=start
    )


def name(ordinal: int) -> str:
    return f"g{ordinal:06d}"


def closed(ordinal: int, size: int = 2, failed: tuple[int, ...] = ()) -> GroupClosed:
    members = tuple(
        Member(
            episode=f"{name(ordinal)}-{member}", attempt=0, failed=FailReason.HOST_LOST if member in failed else None
        )
        for member in range(size)
    )
    return GroupClosed(run=RUN, group=name(ordinal), members=members)


def header(
    ordinal: int,
    member: int,
    versions: dict[int, int] | None = None,
    reward: float | None = None,
    longest: int = 10,
    unsound: str = "",
) -> Header:
    counts = {0: 3} if versions is None else versions
    return Header(
        episode=f"{name(ordinal)}-{member}",
        group=name(ordinal),
        attempt=0,
        env="letters",
        harness="direct",
        reward=float(member % 2) if reward is None else reward,
        versions=tuple(VersionCount(version, tokens) for version, tokens in sorted(counts.items())),
        sampled_tokens=sum(counts.values()),
        longest=longest,
        unsound=unsound,
    )


def trained(action: Train) -> BatchTrained:
    return BatchTrained(
        run=RUN,
        version=action.base + 1,
        base=action.base,
        episodes=action.episodes,
        groups=action.groups,
        config_digest="d",
        lag=action.lag,
    )


def retired(action: Retire) -> list[TrajectoryRetired]:
    return [
        TrajectoryRetired(
            run=RUN, episode=one.episode, group=action.group, reason=action.reason, version=action.version
        )
        for one in action.headers
    ]


def ready(
    batcher: Batcher, ordinal: int, versions: dict[int, int] | None = None, *, start: int = 0, **more: float | str
) -> None:
    batcher.apply(opened(ordinal, start))
    for member in range(2):
        batcher.apply(header(ordinal, member, versions, **more))  # type: ignore[arg-type]
    batcher.apply(closed(ordinal))


def at(version: int, the_rules: Rules) -> Batcher:
    return Batcher(the_rules, State(version=version))


def test_a_batch_takes_the_oldest_groups_first() -> None:
    batcher = at(1, rules())
    ready(batcher, 0, {1: 4})
    ready(batcher, 1, {0: 2, 1: 2})
    ready(batcher, 2, {1: 4})
    action = batcher.decide(0.0)
    assert isinstance(action, Train)
    assert action.groups == (name(1), name(0))
    assert action.lag == 1
    assert {count.lag: count.tokens for count in action.lags} == {0: 12, 1: 4}


def test_an_open_group_is_not_trained() -> None:
    batcher = Batcher(rules(groups_per_step=1))
    batcher.apply(opened(0))
    batcher.apply(header(0, 0))
    batcher.apply(header(0, 1))
    assert isinstance(batcher.decide(0.0), Wait)
    batcher.apply(closed(0))
    assert isinstance(batcher.decide(0.0), Train)


def test_a_closed_group_waits_for_the_verdicts_that_it_names() -> None:
    batcher = Batcher(rules(groups_per_step=1))
    batcher.apply(opened(0))
    batcher.apply(header(0, 0))
    batcher.apply(closed(0))
    assert isinstance(batcher.decide(0.0), Wait)
    batcher.apply(header(0, 1))
    assert isinstance(batcher.decide(0.0), Train)


def test_the_bound_is_inclusive() -> None:
    batcher = at(3, rules(groups_per_step=1, max_lag=2))
    ready(batcher, 0, {1: 1, 3: 9})
    action = batcher.decide(0.0)
    assert isinstance(action, Train)
    assert action.lag == 2


def test_drop_retires_the_whole_group_for_one_token_beyond_the_bound() -> None:
    batcher = at(3, rules(groups_per_step=1, max_lag=1))
    batcher.apply(opened(0))
    batcher.apply(header(0, 0, {1: 1, 3: 9}))
    batcher.apply(header(0, 1, {3: 9}))
    batcher.apply(closed(0))
    action = batcher.decide(0.0)
    assert isinstance(action, Retire)
    assert (action.reason, action.lag, len(action.headers)) == (RetireReason.STALE, 2, 2)


def test_mask_turns_old_tokens_into_context_and_counts_them() -> None:
    batcher = at(3, rules("mask", groups_per_step=1, max_lag=1))
    ready(batcher, 0, {1: 1, 2: 4, 3: 9})
    action = batcher.decide(0.0)
    assert isinstance(action, Train)
    assert (action.lag, action.oldest_allowed, action.masked_tokens, action.loss_tokens) == (1, 2, 2, 26)


def test_mask_retires_a_group_of_which_nothing_is_left() -> None:
    batcher = at(3, rules("mask", groups_per_step=1, max_lag=1))
    ready(batcher, 0, {0: 1, 1: 4})
    action = batcher.decide(0.0)
    assert isinstance(action, Retire)
    assert action.reason is RetireReason.STALE


def test_wait_holds_the_step_for_a_group_that_it_would_overtake_beyond_the_bound() -> None:
    batcher = at(1, rules("wait", groups_per_step=1, max_lag=1))
    batcher.apply(opened(0, start=0))
    ready(batcher, 1, {1: 4}, start=1)
    action = batcher.decide(5.0)
    assert isinstance(action, Wait)
    assert action.until == 65.0
    for member in range(2):
        batcher.apply(header(0, member, {0: 1}))
    batcher.apply(closed(0))
    action = batcher.decide(6.0)
    assert isinstance(action, Train)
    assert action.groups == (name(0),)


def test_wait_does_not_hold_the_step_for_a_group_that_has_time() -> None:
    batcher = at(0, rules("wait", groups_per_step=1, max_lag=1))
    batcher.apply(opened(0, start=0))
    ready(batcher, 1, {0: 4})
    assert isinstance(batcher.decide(5.0), Train)


def test_wait_looks_ahead_for_several_groups_with_the_same_deadline() -> None:
    batcher = at(1, rules("wait", groups_per_step=1, max_lag=2))
    for ordinal in (0, 1):
        batcher.apply(opened(ordinal, start=0))
    ready(batcher, 2, {1: 4}, start=1)
    assert isinstance(batcher.decide(0.0), Wait)


def test_a_group_that_blocks_too_long_is_retired_with_its_reason() -> None:
    batcher = at(1, rules("wait", groups_per_step=1, max_lag=1))
    batcher.apply(opened(0, start=0))
    batcher.apply(header(0, 1, {0: 1}))
    ready(batcher, 1, {1: 4}, start=1)
    assert isinstance(batcher.decide(0.0), Wait)
    assert isinstance(batcher.decide(59.0), Wait)
    action = batcher.decide(60.0)
    assert isinstance(action, Retire)
    assert (action.reason, action.group) == (RetireReason.TIMED_OUT, name(0))
    for fact in retired(action):
        batcher.apply(fact)
    assert isinstance(batcher.decide(60.0), Train)
    batcher.apply(header(0, 0, {0: 1}))
    late = batcher.decide(61.0)
    assert isinstance(late, Retire)
    assert late.reason is RetireReason.TIMED_OUT


def test_a_blocking_group_without_verdicts_times_out_too() -> None:
    batcher = at(1, rules("wait", groups_per_step=1, max_lag=1))
    batcher.apply(opened(0, start=0))
    ready(batcher, 1, {1: 4}, start=1)
    assert isinstance(batcher.decide(0.0), Wait)
    assert isinstance(batcher.decide(60.0), Train)
    batcher.apply(header(0, 0, {0: 1}))
    late = batcher.decide(61.0)
    assert isinstance(late, Retire)
    assert late.reason is RetireReason.TIMED_OUT


def test_a_batch_takes_all_that_is_ready_up_to_its_most() -> None:
    batcher = Batcher(rules(groups_per_step=2, groups_per_step_most=4))
    ready(batcher, 0)
    assert isinstance(batcher.decide(0.0), Wait)
    for ordinal in range(1, 6):
        ready(batcher, ordinal)
    action = batcher.decide(0.0)
    assert isinstance(action, Train)
    assert action.groups == tuple(name(ordinal) for ordinal in range(4))
    batcher.apply(trained(action))
    action = batcher.decide(0.0)
    assert isinstance(action, Train)
    assert action.groups == (name(4), name(5))


def test_larger_batches_leave_more_time_to_a_running_group() -> None:
    for most, held in ((0, True), (2, False)):
        batcher = at(1, rules("wait", groups_per_step=1, max_lag=2, groups_per_step_most=most))
        for ordinal in (0, 1):
            batcher.apply(opened(ordinal, start=0))
        ready(batcher, 2, {1: 4}, start=1)
        assert isinstance(batcher.decide(0.0), Wait) is held


def test_wait_leaves_nobody_behind_at_the_last_step() -> None:
    batcher = at(9, rules("wait", groups_per_step=1, max_lag=5, groups_per_step_most=2))
    batcher.apply(opened(0, start=9))
    ready(batcher, 1, {9: 4}, start=9)
    assert isinstance(batcher.decide(0.0), Wait)
    for member in range(2):
        batcher.apply(header(0, member, {9: 1}))
    batcher.apply(closed(0))
    action = batcher.decide(0.0)
    assert isinstance(action, Train)
    assert action.groups == (name(0), name(1))


def test_wait_never_holds_for_groups_that_nothing_can_save() -> None:
    batcher = at(1, rules("wait", groups_per_step=1, max_lag=1))
    ready(batcher, 0, {0: 1})
    ready(batcher, 1, {0: 1})
    assert isinstance(batcher.decide(0.0), Train)


def test_max_lag_zero_trains_only_what_the_newest_version_sampled() -> None:
    for mode in ("drop", "wait", "mask"):
        batcher = at(2, rules(mode, groups_per_step=1, max_lag=0))  # type: ignore[arg-type]
        ready(batcher, 0, {2: 3}, start=2)
        ready(batcher, 1, {1: 3}, start=1)
        first = batcher.decide(0.0)
        assert isinstance(first, Retire)
        assert first.group == name(1)
        for fact in retired(first):
            batcher.apply(fact)
        second = batcher.decide(0.0)
        assert isinstance(second, Train)
        assert second.lag == 0


def test_failed_slots_are_left_out_and_a_group_of_one_is_retired() -> None:
    batcher = Batcher(rules(groups_per_step=1))
    batcher.apply(opened(0, size=3))
    batcher.apply(header(0, 0))
    batcher.apply(header(0, 2))
    batcher.apply(closed(0, size=3, failed=(1,)))
    action = batcher.decide(0.0)
    assert isinstance(action, Train)
    assert action.episodes == (f"{name(0)}-0", f"{name(0)}-2")
    batcher.apply(trained(action))
    batcher.apply(opened(1))
    batcher.apply(header(1, 0))
    batcher.apply(closed(1, failed=(1,)))
    retire = batcher.decide(0.0)
    assert isinstance(retire, Retire)
    assert retire.reason is RetireReason.TOO_FEW


def test_a_group_that_failed_altogether_is_forgotten() -> None:
    batcher = Batcher(rules(groups_per_step=1))
    batcher.apply(opened(0))
    batcher.apply(closed(0, failed=(0, 1)))
    assert isinstance(batcher.decide(0.0), Wait)
    assert batcher.state.groups == {}


@pytest.mark.parametrize(
    ("more", "reason"),
    [({"longest": 101}, RetireReason.TOO_LONG), ({"unsound": "log-prob -9999"}, RetireReason.INVALID)],
)
def test_what_cannot_be_trained_is_retired_with_its_reason(more: dict[str, int | str], reason: RetireReason) -> None:
    batcher = Batcher(rules(groups_per_step=1))
    ready(batcher, 0, **more)  # type: ignore[arg-type]
    action = batcher.decide(0.0)
    assert isinstance(action, Retire)
    assert action.reason is reason
    assert action.detail


def test_tokens_of_a_version_that_was_never_trained_are_invalid() -> None:
    batcher = Batcher(rules(groups_per_step=1))
    ready(batcher, 0, {1: 3})
    action = batcher.decide(0.0)
    assert isinstance(action, Retire)
    assert action.reason is RetireReason.INVALID


def test_groups_of_equal_rewards_are_trained_unless_they_are_to_be_refilled() -> None:
    batcher = Batcher(rules(groups_per_step=1))
    ready(batcher, 0, reward=1.0)
    assert isinstance(batcher.decide(0.0), Train)


def test_dynamic_sampling_refills_equal_rewards_up_to_its_cap() -> None:
    batcher = Batcher(rules(groups_per_step=1, dynamic_sampling=True, refills_per_step=2))
    for ordinal in range(4):
        ready(batcher, ordinal, reward=1.0)
    seen = []
    for _ in range(2):
        action = batcher.decide(0.0)
        assert isinstance(action, Retire)
        seen.append(action.reason)
        for fact in retired(action):
            batcher.apply(fact)
    assert seen == [RetireReason.ZERO_VARIANCE] * 2
    action = batcher.decide(0.0)
    assert isinstance(action, Train)
    batcher.apply(trained(action))
    assert isinstance(batcher.decide(0.0), Retire)


def test_eval_groups_are_no_business_of_the_batcher() -> None:
    batcher = Batcher(rules(groups_per_step=1))
    batcher.apply(msgspec.structs.replace(opened(0), purpose="eval"))
    batcher.apply(closed(0))
    assert isinstance(batcher.decide(0.0), Wait)
    assert batcher.state.groups == {}


def test_what_is_left_after_the_last_step_is_retired_as_not_needed_even_if_it_comes_late() -> None:
    batcher = at(10, rules())
    batcher.apply(opened(0))
    batcher.apply(header(0, 0, {9: 1}))
    first = batcher.decide(0.0)
    assert isinstance(first, Retire)
    assert first.reason is RetireReason.NOT_NEEDED
    for fact in retired(first):
        batcher.apply(fact)
    assert isinstance(batcher.decide(0.0), Done)
    batcher.apply(header(0, 1, {9: 1}))
    late = batcher.decide(0.0)
    assert isinstance(late, Retire)
    assert late.reason is RetireReason.NOT_NEEDED


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
