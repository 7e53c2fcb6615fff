"""The attempt's model key, as the proxy knows it: only its hash ever leaves the manager.

Bucket `of_keys`, entry `<run>.<sha256 of the key, hex>`. The manager writes it before the agent
starts and marks it ended when the agent is gone; the proxy reads through on an unknown key.
"""

import hashlib

import msgspec

from openforge.protos.fact import token

KEY_BUCKET = "of_keys"


class AttemptKey(msgspec.Struct, frozen=True, kw_only=True):
    """Opens model calls of one attempt until `expires_at` (Unix seconds) or its end."""

    run: str
    episode: str
    attempt: int
    turns: int
    tokens_per_turn: int
    expires_at: float
    ended: bool = False

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "AttemptKey":
        return msgspec.msgpack.decode(data, type=cls)


def key_entry(run: str, key: str) -> str:
    """Where the bucket keeps what is known of `key`."""
    return f"{token('run', run)}.{hashlib.sha256(key.encode()).hexdigest()}"
