"""Model keys: one for each attempt, known to the bus by its hash alone, dead when the agent is gone."""

import secrets
import time

import msgspec
from nats.js.kv import KeyValue

from openforge.bus import Bus
from openforge.protos import KEY_BUCKET, AttemptKey, EpisodeRequested, key_entry

_GRACE_S = 60.0


class Key:
    """A minted key. `secret` exists here and in the agent's own settings, nowhere else."""

    def __init__(self, bucket: KeyValue, secret: str, entry: AttemptKey) -> None:
        self.secret = secret
        self._bucket = bucket
        self._entry = entry

    async def end(self) -> None:
        ended = msgspec.structs.replace(self._entry, ended=True)
        await self._bucket.put(key_entry(self._entry.run, self.secret), ended.encode())


class KeyMint:
    def __init__(self, bucket: KeyValue) -> None:
        self._bucket = bucket

    @classmethod
    async def open(cls, bus: Bus) -> "KeyMint":
        return cls(await bus.bucket(KEY_BUCKET))

    async def mint(self, request: EpisodeRequested) -> Key:
        """A key that the proxy knows from now on."""
        secret = "of-" + secrets.token_urlsafe(32)
        entry = AttemptKey(
            run=request.run,
            episode=request.episode,
            attempt=request.attempt,
            turns=request.limits.turns,
            tokens_per_turn=request.limits.tokens_per_turn,
            expires_at=time.time() + request.limits.timeout_s + _GRACE_S,
        )
        await self._bucket.put(key_entry(request.run, secret), entry.encode())
        return Key(self._bucket, secret, entry)
