"""Dead letters: what could not be handled, kept with its reason so that people can look.

Promises: a service tells the same message dead once, over restarts too.
"""

import logging
import traceback

import msgspec
from nats.aio.msg import Msg

from openforge.blobs import Blobs
from openforge.bus.envelope import MSG_ID
from openforge.bus.link import Link
from openforge.bus.lookup import all_on
from openforge.bus.receive import Place, payload_of
from openforge.bus.streams import DEAD, DEAD_SUBJECTS
from openforge.bus.tell import sealed
from openforge.protos import DeadLetter, token

logger = logging.getLogger("openforge.bus")
_DETAIL_LINES = 20
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(DeadLetter).decode


class Dead:
    def __init__(self, link: Link, blobs: Blobs) -> None:
        self._link = link
        self._blobs = blobs

    async def bury(self, service: str, message: Msg, place: Place, reason: str, error: BaseException) -> None:
        letter = DeadLetter(
            service=service,
            stream=place.stream,
            sequence=place.sequence,
            subject=place.subject,
            reason=reason,
            detail=last_lines(error),
            deliveries=place.deliveries,
            original=message.data or b"",
            headers={key: value for key, value in (message.headers or {}).items() if key.startswith("Of-")},
        )
        fields = {"service": service, "subject": place.subject, "sequence": place.sequence, "error": repr(error)}
        logger.error(f"dead letter: {reason}", extra={"fields": fields})
        if await self._buried(letter):
            return
        headers = {MSG_ID: f"{service}.{place.stream}.{place.sequence}"}
        payload = await sealed(self._link, self._blobs, _encode(letter), headers)
        await self._link.publish(letter.subject_of_death(), payload, headers)

    async def letters(self, service: str = "*") -> list[DeadLetter]:
        subject = DEAD_SUBJECTS if service == "*" else f"of.dead.{token('service', service)}"
        return [_decode(await payload_of(message, self._blobs)) async for message in all_on(self._link, DEAD, subject)]

    async def _buried(self, letter: DeadLetter) -> bool:
        return any(
            (known.stream, known.sequence) == (letter.stream, letter.sequence)
            for known in await self.letters(letter.service)
        )


def last_lines(error: BaseException) -> str:
    lines = "".join(traceback.format_exception(error)).strip().splitlines()
    return "\n".join(lines[-_DETAIL_LINES:])
