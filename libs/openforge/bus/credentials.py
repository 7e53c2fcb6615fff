"""A folder of nkeys, one for each role, and the server's file that lets them in.

Promises: a seed that exists stays; `users.conf` always names exactly the seeds of the folder; only their owner can read
the seeds.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
import nkeys

from openforge.bus.link import public_key
from openforge.bus.permissions import CONSUMER, OPERATOR, ROLES, Grant, grant
from openforge.protos import token

USERS = "users.conf"
_CONSUMER = f"{CONSUMER}-"


class Credentials:
    """`run` binds the grants to workers of one run, as `OPENFORGE_RUN` does."""

    def __init__(self, folder: Path, *, run: str = "*") -> None:
        self.folder = folder
        self.run = run

    @property
    def users(self) -> Path:
        """To be included by the server's configuration, within `authorization`."""
        return self.folder / USERS

    def seed(self, role: str, name: str = "") -> Path:
        """Where the seed of a role lies, or of the consumer of that name."""
        return self.folder / f"{_CONSUMER + name if role == CONSUMER else role}.nk"

    def make(self, consumers: Iterable[str] = ()) -> list[Path]:
        """Seeds for every role and these consumers, and the users of all that are in the folder."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for role in (OPERATOR, *ROLES):
            _mint(self.seed(role))
        for name in consumers:
            _mint(self.seed(CONSUMER, token("consumer", name)))
        seeds = sorted(self.folder.glob("*.nk"))
        _replace(self.users, users_text([self._grant(seed) for seed in seeds]))
        return seeds

    def _grant(self, seed: Path) -> Grant:
        key = public_key(seed.read_bytes())
        if seed.stem.startswith(_CONSUMER):
            return grant(CONSUMER, key, name=seed.stem.removeprefix(_CONSUMER))
        return grant(seed.stem, key, run=self.run)


def users_text(grants: Iterable[Grant]) -> str:
    """`users: [ ... ]` in the server's own configuration language, which JSON is part of."""
    users = [
        {
            "nkey": granted.key,
            "permissions": {
                "publish": {"allow": granted.publish, "deny": granted.never},
                "subscribe": {"allow": granted.subscribe},
            },
        }
        for granted in grants
    ]
    return "users: " + msgspec.json.format(msgspec.json.encode(users), indent=1).decode() + "\n"


def _mint(file: Path) -> None:
    if not file.exists():
        seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
        _replace(file, bytes(seed).decode() + "\n")


def _replace(file: Path, text: str) -> None:
    scratch = file.with_suffix(".tmp")
    scratch.touch(mode=0o600)
    scratch.write_text(text)
    scratch.replace(file)
