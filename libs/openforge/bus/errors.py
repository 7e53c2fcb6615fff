"""What can go wrong between a service and the bus, each with what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openforge.bus.told import Told
    from openforge.protos import Fact


class BusError(Exception):
    """Something about the bus that waiting does not mend."""


class NoServer(BusError):
    """No server answered, or it did not let us in, within the time that the settings give."""


class BusClosed(BusError):
    """The connection is over for good: we closed it, or the server no longer lets us in."""


class Refused(BusError):
    """The server will never take this message, whatever we wait for."""


class Denied(BusError):
    """The server does not let these credentials do that."""


class AlreadyTold(BusError):
    """The natural key is taken for ever. `same` says whether what lies there equals what was to be told.

    `existing` is what lies there, None if that cannot be decoded.
    """

    def __init__(self, subject: str, sequence: int, same: bool, existing: Told[Fact] | None) -> None:
        super().__init__(
            f"{subject} was told before, at sequence {sequence}, with {'the same' if same else 'other'} bytes"
        )
        self.subject = subject
        self.sequence = sequence
        self.same = same
        self.existing = existing


class Zombie(Exception):
    """Somebody else does this process's work: it must end, and must not be started again."""


class Undecodable(ValueError):
    """A message that lies on a subject of ours but is not what belongs there."""


class UnknownFact(Undecodable):
    """A fact of a name that this version does not know, told by a newer one."""
