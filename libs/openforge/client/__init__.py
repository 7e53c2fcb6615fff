"""What anybody needs to read a run's facts: typed, filtered by the server, resumable by name.

Promises: reading takes nothing away and leaves nothing on the server but a named reader's own cursor; importing this
loads no model, web or array library.
"""

from openforge.bus import BusSettings, Denied, NoServer, Told
from openforge.client.blocking import BlockingClient, BlockingReading
from openforge.client.client import Client
from openforge.client.cursor import NameTaken
from openforge.client.reading import Reading
from openforge.protos import (
    BatchTrained,
    EngineMeasured,
    PolicyPublished,
    PolicyServed,
    TrajectoryRetired,
    TrajectoryVerified,
    TurnRecorded,
    unpack_ids,
    unpack_logprobs,
)

__all__ = [
    "BatchTrained",
    "BlockingClient",
    "BlockingReading",
    "BusSettings",
    "Client",
    "Denied",
    "EngineMeasured",
    "NameTaken",
    "NoServer",
    "PolicyPublished",
    "PolicyServed",
    "Reading",
    "Told",
    "TrajectoryRetired",
    "TrajectoryVerified",
    "TurnRecorded",
    "unpack_ids",
    "unpack_logprobs",
]
