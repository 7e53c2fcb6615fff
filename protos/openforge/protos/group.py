"""Groups: the episodes of one task whose rewards are compared."""

from typing import ClassVar, Literal

import msgspec

from openforge.protos.fact import Fact
from openforge.protos.reasons import FailReason

Purpose = Literal["train", "eval"]


class TaskRef(msgspec.Struct, frozen=True, kw_only=True):
    """One instance of a task: `seed` draws the instance from the template `task` of `env`.

    `env` is what the run's config names: an installed environment, or the absolute path of an `env.py`.
    """

    env: str
    task: str
    seed: int
    split: Literal["train", "heldout"] = "train"


class GroupOpened(Fact, frozen=True, kw_only=True, tag=True):
    """`size` episodes of one task may begin, at weight version `start_version`.

    Groups of purpose `eval` are never trained; they run while `start_version` is served and no
    training group is open, so that every token of theirs comes from that version.
    """

    kind: ClassVar[str] = "group"
    name: ClassVar[str] = "opened"

    group: str
    ordinal: int
    purpose: Purpose
    task: TaskRef
    size: int
    start_version: int

    def key(self) -> tuple[str | int, ...]:
        return (self.group,)


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """How one slot of a group ended: a verdict at `attempt`, or failed for good with `failed`."""

    episode: str
    attempt: int
    failed: FailReason | None = None


class GroupClosed(Fact, frozen=True, kw_only=True, tag=True):
    """Each member has a verdict or has failed for good."""

    kind: ClassVar[str] = "group"
    name: ClassVar[str] = "closed"

    group: str
    members: tuple[Member, ...]

    def key(self) -> tuple[str | int, ...]:
        return (self.group,)
