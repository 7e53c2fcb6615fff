"""The ledger closes whatever the weather, and opens for whatever is lost, doubled or out of line."""

import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pretend_run import PretendRun, Weather

from openforge.protos import (
    BatchTrained,
    EpisodeFailed,
    EpisodeRequested,
    EpisodeSealed,
    Fact,
    GroupClosed,
    GroupOpened,
    TrajectoryRetired,
    TrajectoryVerified,
    TurnRecorded,
)
from openforge.runs import Books, Ledger, Progress, RunConfig, bootstrap, summary


def config(**pacing: object) -> RunConfig:
    return msgspec.convert(
        {
            "run": {"name": "r", "steps": 5, "seed": 3},
            "model": {"path": "/m"},
            "environment": {"name": "shell", "harness": "mini"},
            "pacing": {"groups_per_step": 2, "group_size": 3, "in_flight": 24, "max_lag": 1, **pacing},
            "evaluation": {"heldout_episodes": 7},
        },
        RunConfig,
    )


def ledger_of(facts: list[Fact]) -> Ledger:
    books = Books("r")
    for fact in facts:
        books.apply(fact)
    return books.ledger()


def told(weather: Weather = Weather(failing=0.3, seed=4), **pacing: object) -> list[Fact]:
    return [fact for _, fact in PretendRun(config(**pacing), weather).run().facts]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    failing=st.sampled_from([0.0, 0.3]),
    staleness=st.sampled_from(["drop", "wait", "mask"]),
    dynamic=st.booleans(),
    cut=st.floats(0, 1),
)
def test_the_ledger_closes_at_every_moment_of_every_run(
    seed: int, failing: float, staleness: str, dynamic: bool, cut: float
) -> None:
    facts = told(
        Weather(seed=seed, failing=failing, same_reward=0.4, spread=1.2, restarts=2, delay_s=0.3),
        staleness=staleness,
        dynamic_sampling=dynamic,
    )
    assert ledger_of(facts[: int(cut * len(facts))]).differences == ()
    ledger = ledger_of(facts)
    assert ledger.closes, ledger.differences
    assert ledger.train.in_flight.episodes == ledger.eval.in_flight.episodes == 0
    assert ledger.eval.done.episodes + ledger.eval.failed.episodes == 14
    assert ledger.train.requested == ledger.train.accounted
    assert ledger.versions == 5


def test_attempts_that_failed_are_counted_with_their_tokens_and_causes() -> None:
    ledger = ledger_of(told())
    failures = sum(tally.episodes for tally in ledger.train.failed_attempts.values())
    assert failures > 0
    assert ledger.train.failed.tokens == 2 * failures
    assert ledger.train.attempts == ledger.train.requested.episodes + failures - ledger.train.failed.episodes
    assert sum(fate.requested for fate in ledger.by_task.values()) == ledger.train.requested.episodes


def test_a_turn_that_was_told_after_the_seal_is_counted_apart() -> None:
    facts = told()
    verdict = next(fact for fact in reversed(facts) if isinstance(fact, TrajectoryVerified))
    attempt = (verdict.episode, verdict.attempt)
    turns = [fact for fact in facts if isinstance(fact, TurnRecorded) and (fact.episode, fact.attempt) == attempt]
    seal = EpisodeSealed(
        run="r", episode=verdict.episode, attempt=verdict.attempt, turns=tuple(turn.turn for turn in turns)
    )
    late = msgspec.structs.replace(turns[-1], turn=turns[-1].turn + 1)
    for after in ([seal, late], [late, seal]):
        ledger = ledger_of([*facts, *after])
        assert ledger.closes, ledger.differences
        assert ledger.train.dropped_tokens.get("late", 0) + ledger.eval.dropped_tokens.get("late", 0) == 2


def test_a_ledger_is_json() -> None:
    ledger = ledger_of(told())
    assert msgspec.json.decode(msgspec.json.encode(ledger), type=Ledger) == ledger


def without(kind: type[Fact], wanted: Callable[[Fact], bool] = lambda _: True) -> Callable[[list[Fact]], list[Fact]]:
    """Loses one fact of this kind."""

    def lose(facts: list[Fact]) -> list[Fact]:
        lost = next(fact for fact in reversed(facts) if isinstance(fact, kind) and wanted(fact))
        return [fact for fact in facts if fact is not lost]

    return lose


def changed(kind: type[Fact], **fields: object) -> Callable[[list[Fact]], list[Fact]]:
    """Says something else in the last fact of this kind."""

    def change(facts: list[Fact]) -> list[Fact]:
        victim = next(fact for fact in reversed(facts) if isinstance(fact, kind))
        return [msgspec.structs.replace(fact, **fields) if fact is victim else fact for fact in facts]

    return change


def twice_trained(facts: list[Fact]) -> list[Fact]:
    first, second = [fact for fact in facts if isinstance(fact, BatchTrained)][:2]
    doubled = msgspec.structs.replace(second, episodes=(*second.episodes, first.episodes[0]))
    return [doubled if fact is second else fact for fact in facts]


def trained_and_retired(facts: list[Fact]) -> list[Fact]:
    batch = next(fact for fact in facts if isinstance(fact, BatchTrained))
    retired = TrajectoryRetired(run="r", episode=batch.episodes[0], group=batch.groups[0], reason="stale", version=1)
    return [*facts, retired]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (without(TrajectoryVerified, lambda fact: fact.purpose == "train"), "without a verdict"),
        (without(BatchTrained, lambda fact: fact.version == 3), "version 4 was computed at 3"),
        (without(EpisodeFailed), "was opened before attempt"),
        (without(EpisodeRequested), "was never requested"),
        (without(TurnRecorded), "tokens in its"),
        (without(GroupOpened), "its group was never opened"),
        (without(GroupClosed, lambda fact: fact.group.startswith("g")), "before it closed"),
        (changed(BatchTrained, lag=2), "beyond max_lag = 1"),
        (changed(BatchTrained, base=2), "was computed at 2"),
        (changed(TrajectoryVerified, sampled_tokens=99), "99 in its verdict"),
        (twice_trained, "is in version 1 and in version 2"),
        (trained_and_retired, "and retired"),
    ],
)
def test_what_is_lost_doubled_or_out_of_line_keeps_the_ledger_open(
    harm: Callable[[list[Fact]], list[Fact]], said: str
) -> None:
    ledger = ledger_of(harm(told()))
    assert not ledger.closes
    assert said in "\n".join(ledger.differences)


def test_a_run_that_ended_is_finished_and_summed_up() -> None:
    world = PretendRun(config(staleness="wait"), Weather(seed=1)).run()
    progress = Progress()
    finished_at = [progress.apply(fact, at) or progress.finished(config()) for at, fact in world.facts]
    assert finished_at.index(True) == len(finished_at) - 1
    told_summary = summary(progress, ledger_of([fact for _, fact in world.facts]), config())
    assert told_summary.steps == 5
    assert told_summary.ledger_closes
    assert told_summary.heldout_episodes == 7
    assert told_summary.success_heldout_after_low <= told_summary.success_heldout_after <= 1
    assert told_summary.lag_max <= told_summary.max_lag == 1
    assert told_summary.episodes == 14 + 30
    assert told_summary.tokens == 2 * told_summary.turns == 2 * 44
    assert told_summary.sequences_per_episode == told_summary.delivered_fraction == 1.0
    assert 0 < told_summary.train_s <= told_summary.wall_s
    assert told_summary.seed == 3
    assert " ".join(msgspec.to_builtins(told_summary)) == (
        "steps reward_first_fifth reward_last_fifth success_heldout_before success_heldout_after "
        "success_heldout_after_low heldout_episodes episodes turns tokens delivered_fraction sequences_per_episode "
        "lag_max max_lag ledger_closes train_s wall_s seed breaks dropped_tokens"
    )


def test_progress_is_the_same_in_any_order_of_the_kinds() -> None:
    world = PretendRun(config(), Weather(seed=1, failing=0.2)).run()
    straight, mixed = Progress(), Progress()
    for at, fact in world.facts:
        straight.apply(fact, at)
    shuffled = random.Random(7)
    kinds: dict[str, list[tuple[float, Fact]]] = {}
    for at, fact in world.facts:
        kinds.setdefault(fact.kind, []).append((at, fact))
    while kinds:
        kind = shuffled.choice(sorted(kinds))
        at, fact = kinds[kind].pop(0)
        mixed.apply(fact, at)
        if not kinds[kind]:
            del kinds[kind]
    ledger = ledger_of([])
    assert summary(mixed, ledger, config()) == summary(straight, ledger, config())
    assert mixed.in_flight == straight.in_flight == 0
    assert mixed.finished(config())


def test_a_run_that_only_fails_stands_still_and_says_why() -> None:
    world = PretendRun(config(), Weather(seed=1, failing=1.0, serve_s=0.0)).run(until_s=400.0)
    progress = Progress()
    for at, fact in world.facts:
        progress.apply(fact, at)
    assert progress.stuck(config(), 400.0) is None
    reason = progress.stuck(config(), 700.0)
    assert reason is not None
    assert "nothing moved for 700 s since 'version 0 served'" in reason
    assert "attempts failed so far" in reason


def test_the_bootstrap_gives_the_same_interval_every_time() -> None:
    rewards = [1.0] * 290 + [0.0] * 30
    low, high = bootstrap(rewards)
    assert (low, high) == bootstrap(rewards)
    assert low == pytest.approx(0.872, abs=0.005)
    assert high == pytest.approx(0.938, abs=0.005)
    assert bootstrap([]) == (0.0, 0.0)
