"""A fact as it lies on the bus, and how far somebody has read."""

from enum import Enum
from typing import Final, Generic, Literal, TypeVar

import msgspec

from openforge.protos import Fact

F = TypeVar("F", bound=Fact, covariant=True)


class Told(msgspec.Struct, Generic[F], frozen=True, kw_only=True):
    """`sequence` is the place in the stream of `kind`, `at` when it was stored (Unix seconds, the server's clock).

    `deliveries` counts how often a worker was given it; 1 for everybody else.
    """

    fact: F
    kind: str
    subject: str
    sequence: int
    at: float
    deliveries: int = 1


class Cursors(msgspec.Struct, frozen=True):
    """For each kind the last sequence that was folded; a kind that is not here begins at its first fact."""

    sequences: dict[str, int] = {}

    def __getitem__(self, kind: str) -> int:
        return self.sequences.get(kind, 0)

    def after(self, told: Told[Fact]) -> "Cursors":
        return Cursors({**self.sequences, told.kind: max(told.sequence, self[told.kind])})


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A folder's state in its own encoding, and the cursors up to which it holds the streams."""

    state: bytes
    cursors: Cursors


class CaughtUp(Enum):
    """Everything that existed when following began was yielded; what comes now is new."""

    CAUGHT_UP = "caught_up"


CAUGHT_UP: Final[Literal[CaughtUp.CAUGHT_UP]] = CaughtUp.CAUGHT_UP
