"""Dead letters: messages that a service could not handle, with the reason and the original."""

import msgspec

from openforge.protos.fact import token


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """`original` is the message as it was, `subject`, `stream` and `sequence` say where it lies."""

    service: str
    stream: str
    sequence: int
    subject: str
    reason: str
    detail: str
    deliveries: int
    original: bytes
    headers: dict[str, str] = {}

    def subject_of_death(self) -> str:
        return f"of.dead.{token('service', self.service)}"
