"""What is written down of each sandbox before it exists, so that a later owner can end it.

Promises: a record is there before anything else of its sandbox and gone after it; an owner is known by
process number and start time, so that a reused number is not taken for it.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    started: str

    def lives(self) -> bool:
        return start_time(self.pid) == self.started


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """`groups` are control group folders, `kill_group` the one that holds all processes."""

    id: str
    name: str
    owner: Owner
    labels: dict[str, str]
    uid: int
    groups: tuple[str, ...] = ()
    kill_group: str = ""


class Records:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._me = Owner(pid=os.getpid(), started=start_time(os.getpid()))

    @property
    def me(self) -> Owner:
        return self._me

    def write(self, record: Record) -> None:
        place = self._folder / f"{record.id}.json"
        draft = place.with_suffix(".new")
        draft.write_bytes(msgspec.json.encode(record))
        draft.replace(place)

    def forget(self, record_id: str) -> None:
        (self._folder / f"{record_id}.json").unlink(missing_ok=True)

    def orphans(self, labels: Mapping[str, str]) -> Iterator[Record]:
        """Records with all these labels whose owner is dead."""
        for place in sorted(self._folder.glob("*.json")):
            try:
                record = msgspec.json.decode(place.read_bytes(), type=Record)
            except FileNotFoundError:  # its sandbox ended, or another owner has just cleared it away
                continue
            if labels.items() <= record.labels.items() and not record.owner.lives():
                yield record


def start_time(pid: int) -> str:
    """Field 22 of stat, counted after the name, which may hold anything; empty for no such process."""
    try:
        rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if rest[0] in "ZX" else rest[19]
