"""Facts over JetStream: told once, kept, worked on, followed."""

from openforge.bus.bus import Bus
from openforge.bus.errors import (
    AlreadyTold,
    BusClosed,
    BusError,
    Denied,
    NoServer,
    Refused,
    Undecodable,
    UnknownFact,
    Zombie,
)
from openforge.bus.settings import BadSettings, BusSettings, StreamLimits
from openforge.bus.streams import KINDS
from openforge.bus.told import CAUGHT_UP, CaughtUp, Cursors, Snapshot, Told
from openforge.bus.work import TooManyDeliveries

__all__ = [
    "CAUGHT_UP",
    "KINDS",
    "AlreadyTold",
    "BadSettings",
    "Bus",
    "BusClosed",
    "BusError",
    "BusSettings",
    "CaughtUp",
    "Cursors",
    "Denied",
    "NoServer",
    "Refused",
    "Snapshot",
    "StreamLimits",
    "Told",
    "TooManyDeliveries",
    "Undecodable",
    "UnknownFact",
    "Zombie",
]
