"""Telling a fact: once for ever, whatever breaks.

Promises: a fact that was told is stored; its natural key is taken for ever; a telling that had to be
repeated because its answer was lost is one telling, not two.
"""

from collections import deque
from collections.abc import Iterable
from itertools import count
from typing import NamedTuple

from openforge.blobs import Blobs
from openforge.bus import tracing
from openforge.bus.envelope import BLOB, BLOB_SIZE, ENCODING, FENCE, MSG_ID, seal
from openforge.bus.errors import AlreadyTold, Undecodable
from openforge.bus.link import Answer, Fenced, Link
from openforge.bus.lookup import last_on
from openforge.bus.receive import payload_of, place_of, told_of
from openforge.bus.streams import stream_of
from openforge.protos import Fact

IN_FLIGHT = 256
IN_FLIGHT_BYTES = 8 << 20


class _Telling(NamedTuple):
    """One telling of a fact, ready to be sent any number of times."""

    fact: Fact
    data: bytes
    subject: str
    payload: bytes
    headers: dict[str, str]


async def sealed(link: Link, blobs: Blobs, data: bytes, headers: dict[str, str]) -> bytes:
    """What goes into the message for `data`: itself, packed, or nothing beside a claim to where it lies."""
    payload, encoding = seal(data)
    if encoding:
        headers[ENCODING] = encoding
    if len(payload) <= link.max_payload:
        return payload
    ref = await blobs.put(payload)
    headers |= {BLOB: ref.digest, BLOB_SIZE: str(ref.size)}
    return b""


class Teller:
    def __init__(self, link: Link, blobs: Blobs) -> None:
        self._link = link
        self._blobs = blobs
        self._count = count()

    async def tell(self, fact: Fact) -> int:
        await self._link.up()
        telling = await self._prepare(fact)
        return await self._settle(telling, await self._send(telling))

    async def tell_all(self, facts: Iterable[Fact], in_flight: int = IN_FLIGHT) -> list[int]:
        """Many tellings in flight, in this order on the stream unless the connection breaks meanwhile.

        A key that holds other bytes raises the first `AlreadyTold`, after everything sent is settled.
        """
        sequences: list[int] = []
        sent: deque[tuple[_Telling, Answer]] = deque()
        in_flight_bytes = 0
        await self._link.up()
        try:
            for fact in facts:
                telling = await self._prepare(fact)
                sent.append((telling, await self._send(telling)))
                in_flight_bytes += len(telling.payload)
                while len(sent) >= in_flight or (in_flight_bytes > IN_FLIGHT_BYTES and len(sent) > 1):
                    in_flight_bytes -= len(sent[0][0].payload)
                    sequences.append(await self._settle_or_same(*sent.popleft()))
        finally:
            refused: AlreadyTold | None = None
            while sent:
                try:
                    sequences.append(await self._settle_or_same(*sent.popleft()))
                except AlreadyTold as already:
                    refused = refused or already
        if refused:
            raise refused
        return sequences

    async def _prepare(self, fact: Fact) -> _Telling:
        data = fact.encode()
        # The id names this telling, not the content: whoever finds it at the subject knows that the
        # earlier try was its own, and a second telling of equal bytes is still a second telling.
        headers = {FENCE: "0", MSG_ID: f"{self._link.nonce}.{next(self._count):x}"}
        tracing.inject(headers)
        payload = await sealed(self._link, self._blobs, data, headers)
        return _Telling(fact, data, fact.subject(), payload, headers)

    async def _send(self, telling: _Telling) -> Answer:
        return await self._link.send(telling.subject, telling.payload, telling.headers)

    async def _settle(self, telling: _Telling, answer: Answer) -> int:
        link = self._link
        while True:
            try:
                return (await link.settle(telling.subject, telling.payload, telling.headers, answer)).seq
            except Fenced:
                sequence = await self._own_sequence(telling)
            if sequence is not None:
                return sequence
            answer = await self._send(telling)  # what was there is purged now

    async def _own_sequence(self, telling: _Telling) -> int | None:
        """Where this very telling lies already; raises `AlreadyTold` where another one does."""
        message = await last_on(self._link, stream_of(telling.fact.kind), telling.subject)
        if message is None:
            return None
        place = place_of(message)
        if (message.headers or {}).get(MSG_ID) == telling.headers[MSG_ID]:
            return place.sequence
        try:
            existing = await told_of(message, place, self._blobs)
            same = await payload_of(message, self._blobs) == telling.data
        except Undecodable as error:
            raise AlreadyTold(telling.subject, place.sequence, False, None) from error
        raise AlreadyTold(telling.subject, place.sequence, same, existing)

    async def _settle_or_same(self, telling: _Telling, answer: Answer) -> int:
        try:
            return await self._settle(telling, answer)
        except AlreadyTold as already:
            if not already.same:
                raise
            return already.sequence
