"""Facts of a run as the batch former hears them, as short as tests of it like them."""

from typing import Literal

import msgspec

from openforge.learner.batcher import Batcher, Retire, Rules, State, Train
from openforge.learner.trajectories import Header, VersionCount
from openforge.protos import (
    BatchTrained,
    FailReason,
    GroupClosed,
    GroupOpened,
    Member,
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
