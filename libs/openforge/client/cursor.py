"""How far a named reader has come, kept on the bus beside the facts.

Promises: a name has one reader at a time; one that was replaced is told so before it moves the cursor.
"""

import msgspec

from openforge.bus.envelope import FENCE
from openforge.bus.errors import BusError
from openforge.bus.link import Fenced, Link
from openforge.bus.lookup import last_on, sequence_of
from openforge.bus.streams import CURSOR_BUCKET
from openforge.protos import token

_STREAM = f"KV_{CURSOR_BUCKET}"


class NameTaken(BusError):
    """Another reader has this name, or the name reads something else."""


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """`sequence` is the last one of `stream` that is done; `subjects` is what the name reads, `reader` who reads.

    It lies as JSON in the bucket `of_cursors` under the reader's name.
    """

    stream: str
    subjects: str
    sequence: int
    reader: str


class Cursor:
    """The place of one named reader. `moved` is what is done, `saved` what the bus knows of it."""

    def __init__(self, link: Link, name: str, stream: str, subjects: str) -> None:
        self.name = name
        self._link = link
        self._subject = _subject_of(name)
        self._stream = stream
        self._subjects = subjects
        self._revision = 0
        self.saved = 0

    async def recall(self) -> int | None:
        """The last sequence that is done; None for a new name. Raises `NameTaken` where it reads something else."""
        found = await _read(self._link, self._subject)
        if found is None:
            return None
        self._revision, mark = found
        if mark.sequence < 0:
            return None
        if (mark.stream, mark.subjects) != (self._stream, self._subjects):
            raise NameTaken(
                f"name = {self.name!r} reads {mark.subjects}, not {self._subjects}: "
                f"choose another name, or `await client.forget({self.name!r})` first"
            )
        self.saved = mark.sequence
        return mark.sequence

    async def save(self, sequence: int) -> None:
        """Raises `NameTaken` where another reader has taken over."""
        mark = Mark(stream=self._stream, subjects=self._subjects, sequence=sequence, reader=self._link.nonce)
        data = msgspec.json.encode(mark)
        try:
            self._revision = (await self._link.publish(self._subject, data, {FENCE: str(self._revision)})).seq
        except Fenced:
            found = await _read(self._link, self._subject)
            if found is None or found[1] != mark:  # else it is our own: its answer was lost
                raise NameTaken(f"name = {self.name!r} is read by somebody else now: use one name for each") from None
            self._revision = found[0]
        self.saved = sequence


async def forget(link: Link, name: str) -> None:
    """The name is as if it had never read; a reader that has it now is told at its next save."""
    await link.publish(_subject_of(name), b"", {"KV-Operation": "DEL"})


async def _read(link: Link, subject: str) -> tuple[int, Mark] | None:
    message = await last_on(link, _STREAM, subject)
    if message is None:
        return None
    if not message.data:
        return sequence_of(message), Mark(stream="", subjects="", sequence=-1, reader="")
    return sequence_of(message), msgspec.json.decode(message.data, type=Mark)


def _subject_of(name: str) -> str:
    return f"$KV.{CURSOR_BUCKET}.{token('name', name)}"
