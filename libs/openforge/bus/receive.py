"""Messages of a stream, however they came, as facts."""

from datetime import datetime
from typing import NamedTuple, Protocol

from nats.aio.msg import Msg

from openforge.blobs import BlobLost
from openforge.bus.envelope import ENCODING, blob_claim, decode, open_
from openforge.bus.errors import Undecodable
from openforge.bus.told import Told
from openforge.protos import BlobRef, Fact


class Fetch(Protocol):
    """How bytes that are only named are got."""

    async def get(self, ref: BlobRef) -> bytes: ...


class Place(NamedTuple):
    """Where a message lies, and the how-manieth delivery this is. `pending` more match at that time."""

    stream: str
    subject: str
    sequence: int
    at: float
    deliveries: int = 1
    consumer_sequence: int = 0
    pending: int = 0


def place_of(message: Msg) -> Place:
    """Of a message that a consumer delivered, or that was got directly."""
    headers = message.headers or {}
    if "Nats-Stream" in headers:
        return Place(
            stream=headers["Nats-Stream"],
            subject=headers["Nats-Subject"],
            sequence=int(headers["Nats-Sequence"]),
            at=datetime.fromisoformat(headers["Nats-Time-Stamp"]).timestamp(),
        )
    # $JS.ACK.<stream>.<consumer>.<delivered>.<sequence>.<consumer sequence>.<ns>.<pending>, since
    # v2 with domain and account after the second token and one random token at the end
    tokens = message.reply.split(".")
    first = 2 if len(tokens) == 9 else 4
    stream, _, delivered, sequence, consumer_sequence, ns, pending = tokens[first : first + 7]
    return Place(
        stream=stream,
        subject=message.subject,
        sequence=int(sequence),
        at=int(ns) / 1e9,
        deliveries=int(delivered),
        consumer_sequence=int(consumer_sequence),
        pending=int(pending),
    )


async def payload_of(message: Msg, blobs: Fetch) -> bytes:
    """The bytes that were told: claim redeemed, unpacked; raises `Undecodable`."""
    payload = message.data or b""
    headers = message.headers or {}
    if claim := blob_claim(headers):
        try:
            payload = await blobs.get(BlobRef(*claim))
        except BlobLost as error:
            raise Undecodable(str(error)) from error
    return open_(payload, headers.get(ENCODING))


async def told_of(message: Msg, place: Place, blobs: Fetch) -> Told[Fact]:
    """Raises `Undecodable` where the message is no fact that belongs there."""
    fact = decode(place.subject, await payload_of(message, blobs))
    return Told(
        fact=fact,
        kind=fact.kind,
        subject=place.subject,
        sequence=place.sequence,
        at=place.at,
        deliveries=place.deliveries,
    )
