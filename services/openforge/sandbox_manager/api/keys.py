"""Who may do what: keys of the API.

Promises: a secret is compared in constant time and never shown; a key with an owner sees no sandbox of another.
"""

import secrets
from collections.abc import Sequence
from typing import Literal

import msgspec

from openforge.bus import BadSettings


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """`owner` is empty for a key that opens everything. `number` tells keys apart without their secrets."""

    number: int
    owner: str = ""
    scope: Literal["all", "read"] = "all"

    def opens(self, owner: str) -> bool:
        return not self.owner or self.owner == owner


class ApiKeys:
    """Raises `BadSettings` on an entry that cannot be meant."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._keys = [_parsed(number, entry) for number, entry in enumerate(entries)]

    @property
    def none(self) -> bool:
        return not self._keys

    def find(self, secret: str) -> ApiKey | None:
        given = secret.encode("utf-8", "surrogateescape")
        found = None
        for known, key in self._keys:
            if secrets.compare_digest(known, given):
                found = key
        return found


def _parsed(number: int, entry: str) -> tuple[bytes, ApiKey]:
    secret, _, right = entry.partition("=")
    owner, _, scope = right.partition("/")
    if len(secret) < 8:
        raise BadSettings(
            f"OPENFORGE_SANDBOX_API_KEYS: entry {number + 1} has a secret below 8 characters: use a longer one"
        )
    if scope not in ("", "read"):
        raise BadSettings(
            f"OPENFORGE_SANDBOX_API_KEYS: entry {number + 1} has the scope {scope!r}: use read or leave it out"
        )
    return secret.encode(), ApiKey(number=number, owner=owner, scope="read" if scope else "all")
