"""What one check found."""

from typing import Literal

import msgspec

State = Literal["ok", "note", "fault", "skipped"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """`said` is what was seen, `remedy` what to do; a `note` is worth knowing and no fault."""

    check: str
    state: State
    said: str
    remedy: str = ""


def ok(check: str, said: str) -> Finding:
    return Finding(check=check, state="ok", said=said)


def note(check: str, said: str, remedy: str) -> Finding:
    return Finding(check=check, state="note", said=said, remedy=remedy)


def fault(check: str, said: str, remedy: str) -> Finding:
    return Finding(check=check, state="fault", said=said, remedy=remedy)


def skipped(check: str, why: str) -> Finding:
    return Finding(check=check, state="skipped", said=why)
