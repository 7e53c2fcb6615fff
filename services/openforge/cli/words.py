"""Log lines as a person reads them: what happened, why, and to whom.

Promises: a line of one of our services and the same event said in this process read alike; a traceback is its last
line; any other line stays as it is.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

_OF_MACHINES = {"at", "level", "service", "event", "why", "logger", "trace", "span", "traceback"}
_LONGEST = 400
_READ_BYTES = 64 << 10


class Words(logging.Formatter):
    """For what libraries say in a command, which has no log of its own."""

    def format(self, record: logging.LogRecord) -> str:
        return in_words(record.getMessage(), getattr(record, "fields", {}))


def in_words(event: str, fields: Mapping[str, Any]) -> str:
    why = fields.get("why") or _last_line(str(fields.get("traceback") or ""))
    rest = {name: value for name, value in fields.items() if name not in _OF_MACHINES and value not in (None, "")}
    about = ", ".join(f"{name} {value}" for name, value in rest.items())
    return event + (f" ({about})" if about else "") + (f": {why}" if why else "")


def last_words(log: Path, most: int) -> list[str]:
    """What a log ends with, each thing said once; of our services what they say at their worst level there."""
    begin = max(0, log.stat().st_size - _READ_BYTES)
    with log.open("rb") as file:
        file.seek(begin)
        read = file.read().decode(errors="replace").splitlines()[1 if begin else 0 :]
    told = [_of_service(line) for line in read]
    whole = [
        (line, fields) for line, fields in zip(read, told, strict=True) if line.strip() and not _is_cut(line, fields)
    ]
    errors = any(fields is not None and fields.get("level") in ("error", "critical") for fields in told)
    words = [
        line if fields is None else in_words(str(fields["event"]), fields)
        for line, fields in whole
        if fields is None or not errors or fields.get("level") in ("error", "critical")
    ]
    latest = list(dict.fromkeys(reversed(words)))[:most]
    return [line[:_LONGEST] for line in reversed(latest)]


def _last_line(traceback: str) -> str:
    """What was raised; of a group, whose lines stand within rules and margins, what its last member raised."""
    lines = (line.strip(" |+-") for line in traceback.splitlines())
    return ([line for line in lines if line] or [""])[-1]


def _is_cut(line: str, fields: dict[str, Any] | None) -> bool:
    """Of a service's line the beginning alone was written, as on a full disk."""
    return fields is None and line.startswith('{"at":')


def _of_service(line: str) -> dict[str, Any] | None:
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.MsgspecError:
        return None
    return fields if "event" in fields else None
