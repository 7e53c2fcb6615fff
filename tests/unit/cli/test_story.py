"""What the report says of the bound's cost."""

from openforge.cli.report.story import Story
from openforge.protos import (
    BatchTrained,
    EndReason,
    EpisodeLimits,
    EpisodeRequested,
    Fact,
    LagCount,
    RetireReason,
    TaskRef,
    TrajectoryRetired,
    TrajectoryVerified,
)

TASK = TaskRef(env="letters", task="t", seed=0)


def requested(episode: str) -> Fact:
    return EpisodeRequested(
        run="r",
        episode=episode,
        attempt=0,
        group=episode.rpartition("-")[0],
        purpose="train",
        task=TASK,
        harness="h",
        env_kind="direct",
        limits=EpisodeLimits(timeout_s=1.0, turns=1, tokens_per_turn=1, memory_mb=1, pids=1, disk_mb=1, cpus=1.0),
        seed=0,
    )


def verified(episode: str, tokens: int) -> Fact:
    return TrajectoryVerified(
        run="r",
        episode=episode,
        attempt=0,
        group=episode.rpartition("-")[0],
        purpose="train",
        task=TASK,
        harness="h",
        sequences=(),
        temperature=1.0,
        reward=1.0,
        ended=EndReason.FINISHED,
        sampled_tokens=tokens,
    )


def test_discarded_tokens_their_length_and_the_lags_are_told() -> None:
    facts: list[Fact] = [fact for i in range(3) for fact in (requested(f"g000000-{i}"), verified(f"g000000-{i}", 10))]
    facts += [requested("g000001-0"), verified("g000001-0", 50)]
    facts.append(TrajectoryRetired(run="r", episode="g000001-0", group="g000001", reason=RetireReason.STALE, version=1))
    facts.append(
        BatchTrained(
            run="r",
            version=1,
            base=0,
            episodes=("g000000-0", "g000000-1", "g000000-2"),
            groups=("g000000",),
            config_digest="d",
            lag=1,
            lags=(LagCount(0, 18), LagCount(1, 6)),
            loss_tokens=24,
            masked_tokens=6,
        )
    )
    story = Story(run="r")
    for fact in facts:
        story.apply(fact, 1.0)
    assert story.staleness() == [
        ("tokens discarded", "62.5%"),
        ("trained tokens masked", "20.0%"),
        ("length of the discarded over that of all", "2.50"),
        ("loss tokens at lag 0", "75.0%"),
        ("loss tokens at lag 1", "25.0%"),
    ]


def test_a_run_that_discarded_nothing_says_so() -> None:
    story = Story(run="r")
    for fact in (requested("g000000-0"), verified("g000000-0", 10)):
        story.apply(fact, 1.0)
    assert story.staleness() == [
        ("tokens discarded", "0.0%"),
        ("trained tokens masked", "-"),
        ("length of the discarded over that of all", "-"),
    ]
