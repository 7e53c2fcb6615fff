"""The scheduler's promises: in one small world at a time, then in any weather."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pretend_run import PretendRun, Weather

from openforge.protos import (
    BatchTrained,
    EndReason,
    EngineMeasured,
    EpisodeFailed,
    EpisodeRequested,
    Fact,
    FailReason,
    GroupClosed,
    GroupOpened,
    PolicyServed,
    RetireReason,
    RunPaused,
    RunStopped,
    RunSubmitted,
    StopReason,
    TrajectoryRetired,
    TrajectoryVerified,
)
from openforge.runs import RunConfig, canonical
from openforge.scheduler.core import Catalogue, Core
from openforge.scheduler.state import Known


def config(**changes: object) -> RunConfig:
    """`section__field=value`, on top of four steps of two groups of two."""
    said: dict[str, dict[str, object]] = {
        "run": {"name": "r", "steps": 4},
        "model": {"path": "/m"},
        "environment": {"name": "shell", "harness": "mini"},
        "pacing": {"groups_per_step": 2, "group_size": 2, "in_flight": 64, "max_lag": 1},
        "evaluation": {},
    }
    for name, value in changes.items():
        section, _, field = name.partition("__")
        said[section][field] = value
    return msgspec.convert(said, RunConfig)


class Desk:
    """A core with its facts told by hand."""

    def __init__(self, run: RunConfig) -> None:
        self.core = Core("r")
        self.core.equip(Catalogue(tasks=("a", "b", "c"), env_kind="pipeline"))
        self.now = 100.0
        text, digest = canonical(run)
        self.text, self.digest = text, digest
        self.tell(RunSubmitted(run="r", generation=0, config=text, config_digest=digest))

    def tell(self, *facts: Fact) -> None:
        for fact in facts:
            self.core.apply(fact, self.now)

    def serve(self, version: int, engine: str = "one") -> None:
        self.tell(PolicyServed(run="r", version=version, incarnation=0, engine=engine, digest="", probe_error=0.0))

    def decide(self) -> list[Fact]:
        decided: list[Fact] = []
        while decisions := self.core.due(self.now):
            for decision in decisions:
                self.core.apply(decision, self.now)
                decided.append(decision)
        return decided

    def fail(self, episode: str, attempt: int, reason: FailReason = FailReason.HOST_LOST) -> None:
        self.tell(EpisodeFailed(run="r", episode=episode, attempt=attempt, reason=reason))

    def verify(self, episode: str, attempt: int = 0) -> None:
        group = episode.rpartition("-")[0]
        opened = self.core.known.open[group]
        self.tell(
            TrajectoryVerified(
                run="r",
                episode=episode,
                attempt=attempt,
                group=group,
                purpose=opened.purpose,
                task=opened.task,
                harness="mini",
                sequences=(),
                temperature=1.0,
                reward=1.0,
                ended=EndReason.FINISHED,
            )
        )


def groups(decisions: list[Fact]) -> list[str]:
    return [fact.group for fact in decisions if isinstance(fact, GroupOpened)]


def requests(decisions: list[Fact]) -> list[tuple[str, int]]:
    return [(fact.episode, fact.attempt) for fact in decisions if isinstance(fact, EpisodeRequested)]


def closed(decisions: list[Fact]) -> list[GroupClosed]:
    return [fact for fact in decisions if isinstance(fact, GroupClosed)]


def test_nothing_opens_before_a_version_is_served() -> None:
    desk = Desk(config())
    assert desk.decide() == []
    desk.serve(0)
    assert groups(desk.decide()) == ["g000000", "g000001", "g000002", "g000003"]


def test_a_pressed_engine_lets_fewer_slots_open_and_the_bound_survives_a_restart() -> None:
    desk = Desk(config(run__steps=90, pacing__groups_per_step=20, pacing__in_flight_least=4))
    desk.serve(0)
    assert len(groups(desk.decide())) == 2
    assert desk.core.slots_allowed() == desk.core.slots_open() == 4
    for at_s in range(0, 75, 5):
        desk.tell(EngineMeasured(run="r", engine="one", at_s=at_s, running=4.0, waiting=0.0, kv_use=0.1))
    assert desk.core.slots_allowed() == 64
    assert len(groups(desk.decide())) == 30
    desk.tell(EngineMeasured(run="r", engine="one", at_s=100, running=32.0, waiting=32.0, kv_use=1.0))
    assert desk.core.slots_allowed() == 4 + int(0.7 * 60)
    for member in (0, 1):
        desk.verify(f"g000000-{member}")
    assert groups(desk.decide()) == []
    again = Core("r", Known.decode(desk.core.known.encode()))
    assert again.slots_allowed() == desk.core.slots_allowed()


def test_where_batches_may_grow_as_many_more_groups_open() -> None:
    desk = Desk(config(run__steps=9, pacing__groups_per_step_most=3))
    desk.serve(0)
    assert len(groups(desk.decide())) == 3 + 2
    desk.tell(
        BatchTrained(
            run="r",
            version=1,
            base=0,
            episodes=(),
            groups=("g000000", "g000001", "g000002"),
            config_digest="d",
            lag=0,
        )
    )
    assert groups(desk.decide()) == []
    desk.serve(1)
    assert groups(desk.decide()) == ["g000005", "g000006", "g000007"]


def test_every_member_of_an_opened_group_is_requested_once() -> None:
    desk = Desk(config(pacing__max_lag=0))
    desk.serve(0)
    assert requests(desk.decide()) == [("g000000-0", 0), ("g000000-1", 0), ("g000001-0", 0), ("g000001-1", 0)]
    assert desk.decide() == []


def test_a_failed_attempt_is_tried_again_in_its_slot_after_a_pause() -> None:
    desk = Desk(config())
    desk.serve(0)
    desk.decide()
    desk.fail("g000001-1", 0)
    assert desk.decide() == []
    assert desk.core.next_due() == desk.now + 1.0
    desk.now += 1.0
    assert requests(desk.decide()) == [("g000001-1", 1)]
    assert desk.core.next_due() is None


def test_a_slot_that_used_its_attempts_fails_for_good_and_the_group_closes() -> None:
    desk = Desk(config(pacing__attempts=2))
    desk.serve(0)
    desk.decide()
    desk.verify("g000000-0")
    desk.fail("g000000-1", 0)
    desk.now += 60
    desk.decide()
    desk.fail("g000000-1", 1, FailReason.SANDBOX_FAILED)
    (close,) = closed(desk.decide())
    assert [(m.episode, m.attempt, m.failed) for m in close.members] == [
        ("g000000-0", 0, None),
        ("g000000-1", 1, FailReason.SANDBOX_FAILED),
    ]


def test_a_group_with_one_verdict_is_replaced_since_nothing_can_be_compared() -> None:
    desk = Desk(config(pacing__attempts=1))
    desk.serve(0)
    desk.decide()
    desk.verify("g000000-0")
    desk.fail("g000000-1", 0)
    assert groups(desk.decide()) == ["g000004"]
    desk.tell(TrajectoryRetired(run="r", episode="g000000-0", group="g000000", reason=RetireReason.TOO_FEW, version=0))
    assert desk.decide() == []


def test_a_retired_group_is_replaced_by_exactly_one_however_many_members_it_has() -> None:
    desk = Desk(config())
    desk.serve(0)
    desk.decide()
    for episode in ("g000000-0", "g000000-1"):
        desk.verify(episode)
    desk.decide()
    for episode in ("g000000-0", "g000000-1"):
        desk.tell(TrajectoryRetired(run="r", episode=episode, group="g000000", reason=RetireReason.STALE, version=0))
    assert groups(desk.decide()) == ["g000004"]


def test_groups_retired_for_equal_rewards_are_refilled_up_to_the_cap_of_a_version() -> None:
    desk = Desk(config(pacing__dynamic_sampling=True, pacing__refills_per_step=1))
    desk.serve(0)
    desk.decide()
    refilled: list[str] = []
    for group in ("g000000", "g000001"):
        for member in (0, 1):
            desk.verify(f"{group}-{member}")
        refilled += groups(desk.decide())
        for member in (0, 1):
            desk.tell(
                TrajectoryRetired(
                    run="r", episode=f"{group}-{member}", group=group, reason=RetireReason.ZERO_VARIANCE, version=0
                )
            )
    assert refilled + groups(desk.decide()) == ["g000004"]


def test_a_retired_group_gets_no_more_attempts() -> None:
    desk = Desk(config())
    desk.serve(0)
    desk.decide()
    desk.verify("g000000-0")
    desk.tell(
        TrajectoryRetired(run="r", episode="g000000-0", group="g000000", reason=RetireReason.TIMED_OUT, version=0)
    )
    desk.fail("g000000-1", 0)
    (close,) = closed(desk.decide())
    assert close.members[1].failed is FailReason.HOST_LOST


def test_a_paused_or_stopped_run_opens_nothing_and_still_closes() -> None:
    for rest in (
        RunPaused(run="r", generation=0),
        RunStopped(run="r", generation=0, reason=StopReason.INTERRUPTED),
    ):
        desk = Desk(config())
        desk.serve(0)
        desk.decide()
        desk.tell(rest)
        desk.fail("g000001-0", 0)
        desk.verify("g000000-0")
        desk.verify("g000000-1")
        desk.now += 100
        assert [type(fact) for fact in desk.decide()] == [GroupClosed]
        desk.tell(RunSubmitted(run="r", generation=1, config=desk.text, config_digest=desk.digest))
        assert requests(desk.decide()) == [("g000001-0", 1)]


def test_attempts_cancelled_by_a_stop_do_not_use_up_the_slot() -> None:
    desk = Desk(config(pacing__attempts=1))
    desk.serve(0)
    desk.decide()
    desk.tell(RunStopped(run="r", generation=0, reason=StopReason.INTERRUPTED))
    desk.fail("g000000-0", 0, FailReason.CANCELLED)
    desk.tell(RunSubmitted(run="r", generation=1, config=desk.text, config_digest=desk.digest))
    desk.now += 1
    assert requests(desk.decide()) == [("g000000-0", 1)]


def test_evaluation_comes_first_alone_and_at_version_zero() -> None:
    desk = Desk(config(evaluation__heldout_episodes=3, pacing__in_flight=2))
    desk.serve(0)
    assert groups(desk.decide()) == ["e000-000000", "e000-000001"]
    desk.verify("e000-000000-0")
    assert groups(desk.decide()) == ["e000-000002"]
    desk.verify("e000-000001-0")
    assert groups(desk.decide()) == []
    desk.verify("e000-000002-0")
    assert groups(desk.decide()) == ["g000000"]


def test_each_held_out_task_is_tried_as_often_as_asked() -> None:
    run = config(run__steps=0, evaluation__heldout_episodes=3, evaluation__trials=4, pacing__in_flight=9)
    world = PretendRun(run).run()
    assert [group.size for group in world.opened("eval")] == [4, 4, 4]
    assert len({group.task.seed for group in world.opened("eval")}) == 3


def test_a_run_of_no_steps_only_evaluates() -> None:
    world = PretendRun(config(run__steps=0, evaluation__heldout_episodes=5)).run()
    assert len(world.opened("eval")) == 5
    assert world.opened("train") == []


def test_every_kind_of_task_is_drawn_evenly_and_heldout_instances_are_others() -> None:
    run = config(run__steps=6, evaluation__heldout_episodes=12, pacing__max_lag=0)
    world = PretendRun(run).run()
    train, evals = world.opened("train"), world.opened("eval")
    assert {task: sum(group.task.task == task for group in train) for task in "abc"} == {"a": 4, "b": 4, "c": 4}
    assert len({group.task.seed for group in train}) == len(train)
    assert not {group.task.seed for group in train} & {group.task.seed for group in evals}
    assert {group.task.split for group in evals} == {"heldout"}
    before, after = evals[:12], evals[12:]
    assert [group.task for group in before] == [group.task for group in after]


def test_several_engines_count_by_the_slowest_of_them() -> None:
    core = Core("r", engines=2)
    served = [("one", 0), ("two", 0), ("one", 1), ("two", 1), ("one", 2)]
    for engine, version in served:
        core.apply(PolicyServed(run="r", version=version, incarnation=0, engine=engine, digest="", probe_error=0.0))
    assert core.served_version() == 1
    core.apply(PolicyServed(run="r", version=2, incarnation=0, engine="three", digest="", probe_error=0.0))
    assert core.served_version() == 2


def test_when_nothing_works_only_one_group_is_open_at_a_time() -> None:
    desk = Desk(config(pacing__attempts=1))
    desk.serve(0)
    opened = 0
    for _ in range(6):
        fresh = groups(desk.decide())
        opened += len(fresh)
        for group in list(desk.core.known.open):
            for member in (0, 1):
                desk.fail(f"{group}-{member}", 0)
    assert desk.core.is_probing()
    assert len(desk.core.known.open) == 1
    assert opened == 4 + 5


def test_an_attempt_that_should_have_ended_is_named() -> None:
    desk = Desk(config(pacing__max_lag=0))
    desk.serve(0)
    desk.decide()
    assert desk.core.overdue(desk.now + 200) == []
    assert {(late.episode, late.attempt) for late in desk.core.overdue(desk.now + 241)} == {
        (f"g00000{group}-{member}", 0) for group in (0, 1) for member in (0, 1)
    }


def test_a_restart_between_a_group_and_its_episodes_requests_them() -> None:
    desk = Desk(config(pacing__max_lag=0))
    desk.serve(0)
    first = desk.core.due(desk.now)
    assert groups([*first]) == ["g000000", "g000001"]
    for decision in first:
        desk.core.apply(decision, desk.now)
    core = Core("r", Known.decode(desk.core.known.encode()))
    core.equip(Catalogue(tasks=("a", "b", "c"), env_kind="pipeline"))
    assert [fact.encode() for fact in core.due(desk.now)] == [fact.encode() for fact in desk.core.due(desk.now)]
    assert len(core.due(desk.now)) == 4


weathers = st.builds(
    Weather,
    seed=st.integers(0, 2**31),
    failing=st.sampled_from([0.0, 0.05, 0.3]),
    same_reward=st.sampled_from([0.0, 0.4]),
    step_s=st.sampled_from([0.1, 1.0, 4.0]),
    serve_s=st.sampled_from([0.0, 0.5]),
    spread=st.sampled_from([0.0, 0.9, 1.5]),
    delay_s=st.sampled_from([0.0, 0.3, 3.0]),
    restarts=st.integers(0, 4),
    duplicates=st.booleans(),
)
runs = st.builds(
    lambda **fields: config(**fields),
    run__steps=st.integers(0, 6),
    run__seed=st.integers(0, 3),
    pacing__groups_per_step=st.integers(1, 4),
    pacing__group_size=st.integers(2, 4),
    pacing__in_flight=st.integers(4, 40),
    pacing__in_flight_least=st.sampled_from([0, 4]),
    pacing__max_lag=st.integers(0, 4),
    pacing__attempts=st.integers(1, 3),
    pacing__staleness=st.sampled_from(["drop", "wait", "mask"]),
    pacing__dynamic_sampling=st.booleans(),
    pacing__refills_per_step=st.integers(0, 3),
    evaluation__heldout_episodes=st.sampled_from([0, 3, 9]),
    evaluation__before=st.booleans(),
    evaluation__after=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(run=runs, weather=weathers)
def test_in_any_weather_every_promise_holds_and_the_run_ends(run: RunConfig, weather: Weather) -> None:
    world = PretendRun(run, weather).run()
    assert world.broken == []
    assert world.steps == run.run.steps
    assert world.still_open == []
    assert len(world.opened("train")) == run.run.steps * run.pacing.groups_per_step + world.gone
    evaluated = {group.start_version for group in world.opened("eval")}
    assert len(world.opened("eval")) == len(evaluated) * run.evaluation.heldout_episodes
    assert max(world.lags, default=0) <= run.pacing.max_lag


@settings(max_examples=20, deadline=None)
@given(run=runs, weather=weathers)
def test_without_lag_the_run_is_exactly_synchronous(run: RunConfig, weather: Weather) -> None:
    pacing = msgspec.structs.replace(run.pacing, max_lag=0, dynamic_sampling=False)
    world = PretendRun(msgspec.structs.replace(run, pacing=pacing), msgspec.structs.replace(weather, failing=0.0)).run()
    assert world.broken == []
    assert world.evicted == 0
    assert set(world.lags) <= {0}
    assert [group.start_version for group in world.opened("train")] == [
        ordinal // pacing.groups_per_step for ordinal in range(len(world.opened("train")))
    ]


@settings(max_examples=20, deadline=None)
@given(run=runs, weather=weathers, order=st.integers(0, 2**31))
def test_any_order_of_the_kinds_gives_the_same_state(run: RunConfig, weather: Weather, order: int) -> None:
    world = PretendRun(run, weather).run()
    shuffled = random.Random(order)
    kinds: dict[str, list[tuple[float, Fact]]] = {}
    for at, fact in world.facts:
        kinds.setdefault(fact.kind, []).append((at, fact))
    straight, mixed = Known(), Known()
    for at, fact in world.facts:
        straight.apply(fact, at)
    while kinds:
        kind = shuffled.choice(sorted(kinds))
        at, fact = kinds[kind].pop(0)
        mixed.apply(fact, at)
        if not kinds[kind]:
            del kinds[kind]
    assert mixed == straight
    assert Known.decode(mixed.encode()) == mixed


def simulated(staleness: str) -> PretendRun:
    run = config(
        run__steps=40,
        pacing__groups_per_step=8,
        pacing__group_size=2,
        pacing__in_flight=48,
        pacing__max_lag=2,
        pacing__staleness=staleness,
    )
    world = PretendRun(run, Weather(failing=0.02, spread=0.99, restarts=3, delay_s=0.05)).run()
    assert world.broken == []
    assert (world.steps, world.still_open) == (40, [])
    return world


def test_dropping_trains_on_the_short_and_waiting_leaves_slots_idle() -> None:
    drop, wait, mask = simulated("drop"), simulated("wait"), simulated("mask")
    assert drop.evicted > 0
    assert (wait.evicted, mask.evicted) == (0, 0)
    assert drop.trained_over_offered < 0.9
    assert min(wait.trained_over_offered, mask.trained_over_offered) == pytest.approx(1.0)
    assert wait.now > drop.now
    assert wait.idle_share > mask.idle_share
