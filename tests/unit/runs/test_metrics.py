"""The numbers of a run agree with what its ledger says, however its streams are read side by side."""

import random
from collections import defaultdict
from typing import Literal

import msgspec
from pretend_run import PretendRun, Weather

from openforge.protos import (
    BatchTrained,
    EndReason,
    EpisodeEnded,
    EpisodeFailed,
    EpisodeLimits,
    EpisodeRequested,
    EpisodeSealed,
    EpisodeStarted,
    Fact,
    FailReason,
    GroupClosed,
    GroupOpened,
    Member,
    RunPaused,
    RunSubmitted,
    TaskRef,
)
from openforge.runs import Books, RunConfig, canonical
from openforge.runs.metrics import ENOUGH, METRICS, RunMetrics
from openforge.runs.names import eval_group

Told = list[tuple[float, Fact]]
Numbers = dict[str, dict[tuple[str, ...], float]]
CONFIG = msgspec.convert(
    {
        "run": {"name": "r", "steps": 5, "seed": 3},
        "model": {"path": "/m"},
        "environment": {"name": "shell", "harness": "mini"},
        "pacing": {"groups_per_step": 2, "group_size": 3, "in_flight": 24, "max_lag": 1},
        "evaluation": {"heldout_episodes": 7},
    },
    RunConfig,
)


def numbers_of(told: Told) -> Numbers:
    metrics = RunMetrics("r")
    for at, fact in told:
        metrics.apply(fact, at)
    numbers: Numbers = defaultdict(dict)
    for sample in metrics.samples():
        assert len(sample.labels) == len(METRICS[sample.name].labels)
        assert sample.labels not in numbers[sample.name]
        numbers[sample.name][sample.labels] = sample.value
    return numbers


def pretended() -> Told:
    return PretendRun(CONFIG, Weather(failing=0.3, seed=4)).run().facts


def side_by_side(told: Told, seed: int) -> Told:
    """The same facts, each kind in its order, the kinds in any."""
    lanes: dict[str, Told] = defaultdict(list)
    for at, fact in told:
        lanes[fact.kind].append((at, fact))
    draw, mixed = random.Random(seed), []
    while full := [lane for lane in lanes.values() if lane]:
        mixed.append(draw.choice(full).pop(0))
    return mixed


def request(episode: str, attempt: int = 0, task: str = "easy") -> EpisodeRequested:
    return EpisodeRequested(
        run="r",
        episode=episode,
        attempt=attempt,
        group=episode.rpartition("-")[0],
        purpose="train",
        task=TaskRef(env="shell", task=task, seed=1),
        harness="mini",
        env_kind="command",
        limits=EpisodeLimits(timeout_s=1, turns=1, tokens_per_turn=1),
        seed=0,
    )


def opened(group: str, purpose: Literal["train", "eval"]) -> GroupOpened:
    task = TaskRef(env="shell", task="easy", seed=1)
    return GroupOpened(run="r", group=group, ordinal=0, purpose=purpose, task=task, size=1, start_version=0)


def started(episode: str) -> EpisodeStarted:
    return EpisodeStarted(run="r", episode=episode, attempt=0, manager="m", sandbox="b", isolation="full")


def test_numbers_agree_with_the_ledger() -> None:
    told = pretended()
    books = Books("r")
    for _, fact in told:
        books.apply(fact)
    ledger, numbers = books.ledger(), numbers_of(told)
    assert numbers["openforge_ledger_differences"][()] == 0
    assert numbers["openforge_trained_version"][()] == 5
    assert numbers["openforge_weight_debt"][()] == 0
    assert numbers["openforge_episodes"][()] == ledger.train.requested.episodes + ledger.eval.requested.episodes
    assert numbers["openforge_sampled_tokens"][()] == ledger.train.requested.tokens + ledger.eval.requested.tokens
    assert {why: times for (why,), times in numbers["openforge_retired"].items()} == {
        why: tally.episodes for why, tally in ledger.train.retired.items()
    }
    failed = sum(tally.episodes for tally in ledger.train.failed_attempts.values())
    failed += sum(tally.episodes for tally in ledger.eval.failed_attempts.values())
    assert sum(numbers["openforge_failed_attempts"].values()) == failed > 0
    assert set(numbers["openforge_attempts"].values()) == {0}  # nobody waits in a run that is over


def test_kinds_may_be_read_in_any_order() -> None:
    told = pretended()
    in_time, timed = numbers_of(told), {"openforge_stage_seconds", "openforge_stage_attempts"}
    for seed in range(3):
        mixed = numbers_of(side_by_side(told, seed))
        assert {name for name in METRICS if mixed[name] != in_time[name]} <= timed


def test_who_waits_for_whom_and_since_when() -> None:
    told: Told = [(float(n), request(f"g-{n}")) for n in range(5)]
    told += [(10.0 + n, started(f"g-{n}")) for n in range(4)]
    told += [(20.0, EpisodeEnded(run="r", episode=f"g-{n}", attempt=0, reason=EndReason.FINISHED)) for n in range(3)]
    told += [(21.0, EpisodeSealed(run="r", episode=f"g-{n}", attempt=0, turns=())) for n in range(2)]
    told += [(30.0, EpisodeFailed(run="r", episode="g-0", attempt=0, reason=FailReason.VERIFIER_FAILED))]
    told += [(31.0, request("g-0", 1))]
    numbers = numbers_of(told)
    assert numbers["openforge_attempts"] == {
        ("sandbox",): 2, ("agent",): 1, ("proxy",): 1, ("verifier",): 1, ("learner",): 0,
    }  # fmt: skip
    assert numbers["openforge_oldest_attempt_timestamp_seconds"] == {
        ("sandbox",): 4, ("agent",): 13, ("proxy",): 20, ("verifier",): 21,
    }  # fmt: skip
    assert numbers["openforge_stage_seconds"][("sandbox",)] == 40
    assert numbers["openforge_stage_attempts"][("verifier",)] == 1


def test_losses_that_depend_on_the_task_show() -> None:
    told: Told = []
    for n in range(ENOUGH):
        told += [(float(n), request(f"g{n}-0", task="hard")), (float(n), request(f"g{n}-1"))]
        lost = Member(episode=f"g{n}-0", attempt=0, failed=FailReason.SANDBOX_FAILED if n % 2 else None)
        members = (lost, Member(episode=f"g{n}-1", attempt=0))
        told.append((float(n), GroupClosed(run="r", group=f"g{n}", members=members)))
    numbers = numbers_of(told)
    assert numbers["openforge_lost_share"] == {
        ("task", "hard"): 0.5, ("task", "easy"): 0.0, ("harness", "mini"): 0.25,
    }  # fmt: skip


def test_a_batch_is_waited_for_since_training_began_went_on_or_made_the_last_one() -> None:
    text, digest = canonical(CONFIG)
    submitted = RunSubmitted(run="r", generation=0, config=text, config_digest=digest)
    told: Told = [(10.0, submitted), (11.0, opened(eval_group(0, 0), "eval"))]
    assert numbers_of(told)["openforge_batch_timestamp_seconds"] == {}
    told.append((500.0, opened("g0", "train")))
    assert numbers_of(told)["openforge_batch_timestamp_seconds"] == {(): 500}
    told += [(600.0, RunPaused(run="r", generation=0)), (9000.0, msgspec.structs.replace(submitted, generation=1))]
    assert numbers_of(told)["openforge_batch_timestamp_seconds"] == {(): 9000}
    trained = BatchTrained(run="r", version=1, base=0, episodes=(), groups=("g0",), config_digest=digest, lag=0)
    assert numbers_of([*told, (9100.0, trained)])["openforge_batch_timestamp_seconds"] == {(): 9100}
