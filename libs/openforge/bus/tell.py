"""Telling a fact: once for ever, whatever breaks.

Promises: a fact that was told is stored; its natural key is taken for ever; a telling that had to be
repeated because its answer was lost is one telling, not two.
"""

from collections import deque
from collections.abc import Iterable
from itertools import count
from typing import NamedTuple

import msgspec

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
IN_FLIGHT_BYTES = 32 << 20


class _Telling(NamedTuple):
    """One telling of a fact, or of bytes that once were told, that can be sent any number of times."""

    fact: Fact | bytes
    subject: str
    headers: dict[str, str]

    def data(self) -> bytes:
        return self.fact if isinstance(self.fact, bytes) else self.fact.encode()

    def stream(self) -> str:
        return stream_of(self.subject.split(".", 3)[2])


async def sealed(link: Link, blobs: Blobs, data: bytes, headers: dict[str, str]) -> bytes:
    """What goes into the message for `data`: itself, packed, or nothing beside a claim to where it lies."""
    payload, encoding = seal(data)
    if encoding:
        headers[ENCODING] = encoding
    return bytes(payload) if len(payload) <= link.max_payload else await _claim(blobs, bytes(payload), headers)


async def _claim(blobs: Blobs, payload: bytes, headers: dict[str, str]) -> bytes:
    ref = await blobs.put(payload)
    headers |= {BLOB: ref.digest, BLOB_SIZE: str(ref.size)}
    return b""


class Teller:
    def __init__(self, link: Link, blobs: Blobs) -> None:
        self._link = link
        self._blobs = blobs
        self._count = count()
        self._encode_into = msgspec.msgpack.Encoder().encode_into
        self._scratch = bytearray()

    async def tell(self, fact: Fact) -> int:
        await self._link.up()
        telling = self._telling(fact, fact.subject())
        answer, _ = await self._send(telling)
        return await self._settle(telling, answer)

    async def tell_all(self, facts: Iterable[Fact], in_flight: int = IN_FLIGHT) -> list[int]:
        """Many tellings in flight, in this order on the stream unless the connection breaks meanwhile.

        A key that holds other bytes raises the first `AlreadyTold`, after everything sent is settled.
        """
        return await self._tell_all((self._telling(fact, fact.subject()) for fact in facts), in_flight)

    async def tell_again(self, told: Iterable[tuple[str, bytes]]) -> list[int]:
        """As `tell_all`, for subjects and the bytes of the facts that were told on them."""
        return await self._tell_all((self._telling(data, subject) for subject, data in told), IN_FLIGHT)

    async def _tell_all(self, tellings: Iterable[_Telling], in_flight: int) -> list[int]:
        sequences: list[int] = []
        sent: deque[tuple[_Telling, Answer, int]] = deque()
        in_flight_bytes = 0
        await self._link.up()
        try:
            for telling in tellings:
                answer, size = await self._send(telling)
                sent.append((telling, answer, size))
                in_flight_bytes += size
                while len(sent) >= in_flight or (in_flight_bytes > IN_FLIGHT_BYTES and len(sent) > 1):
                    telling, answer, size = sent.popleft()
                    in_flight_bytes -= size
                    sequences.append(await self._settle_or_same(telling, answer))
        finally:
            refused: AlreadyTold | None = None
            while sent:
                telling, answer, _ = sent.popleft()
                try:
                    sequences.append(await self._settle_or_same(telling, answer))
                except AlreadyTold as already:
                    refused = refused or already
        if refused:
            raise refused
        return sequences

    def _telling(self, fact: Fact | bytes, subject: str) -> _Telling:
        # The id names this telling, not the content: whoever finds it at the subject knows that the
        # earlier try was its own, and a second telling of equal bytes is still a second telling.
        headers = {FENCE: "0", MSG_ID: f"{self._link.nonce}.{next(self._count):x}"}
        tracing.inject(headers, fact if isinstance(fact, Fact) else None)
        return _Telling(fact, subject, headers)

    async def _send(self, telling: _Telling) -> tuple[Answer, int]:
        """The answer to come, and how many bytes were sent.

        Facts are encoded into one buffer, again for each try: fresh memory for each large fact costs more than all
        the rest of telling it.
        """
        if isinstance(telling.fact, bytes):
            self._scratch[:] = telling.fact
            payload, encoding = seal(self._scratch)
        else:
            self._encode_into(telling.fact, self._scratch)
            fact = telling.fact
            payload, encoding = seal(self._scratch, repeats=fact.repeats(), seams=fact.seams)
        if encoding:
            telling.headers[ENCODING] = encoding
        if len(payload) > self._link.max_payload:
            payload = await _claim(self._blobs, bytes(payload), telling.headers)
        answer = await self._link.send(telling.subject, payload, telling.headers)
        size = len(payload)
        if len(self._scratch) > IN_FLIGHT_BYTES:
            self._scratch = bytearray()
        return answer, size

    async def _settle(self, telling: _Telling, answer: Answer) -> int:
        async def send_again() -> Answer:
            return (await self._send(telling))[0]

        while True:
            try:
                return (await self._link.settle(telling.subject, answer, send_again)).seq
            except Fenced:
                sequence = await self._own_sequence(telling)
            if sequence is not None:
                return sequence
            answer = await send_again()  # what was there is purged now

    async def _own_sequence(self, telling: _Telling) -> int | None:
        """Where this very telling lies already; raises `AlreadyTold` where another one does."""
        message = await last_on(self._link, telling.stream(), telling.subject)
        if message is None:
            return None
        place = place_of(message)
        if (message.headers or {}).get(MSG_ID) == telling.headers[MSG_ID]:
            return place.sequence
        try:
            existing = await told_of(message, place, self._blobs)
            same = await payload_of(message, self._blobs) == telling.data()
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
