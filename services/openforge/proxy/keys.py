"""Which attempt a model key opens, read through to the bucket that the manager writes.

Promises: a key that is in the bucket is known at the next call; an entry is at most `FRESH_S` old; only hashes of
keys are kept.
"""

import asyncio
import time

import msgspec
import nats.errors
from nats.js.errors import KeyNotFoundError
from nats.js.kv import KeyValue

from openforge.protos import AttemptKey, key_entry

FRESH_S = 1.0
_MOST = 4096


class Keys:
    def __init__(self, bucket: KeyValue, run: str) -> None:
        self._bucket = bucket
        self._run = run
        self._known: dict[str, tuple[AttemptKey, float]] = {}

    async def look(self, key: str) -> AttemptKey | None:
        """What is known of the key; None for an unknown one."""
        entry = key_entry(self._run, key)
        now = time.monotonic()
        known = self._known.get(entry)
        if known is not None and now - known[1] < FRESH_S:
            return known[0]
        found = await self._read(entry)
        if found is None:
            self._known.pop(entry, None)
            return None
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[entry] = (found, now)
        return found

    async def _read(self, entry: str) -> AttemptKey | None:
        while True:
            try:
                read = await self._bucket.get(entry)
            except KeyNotFoundError:
                return None
            except (nats.errors.Error, TimeoutError):
                await asyncio.sleep(0.2)  # the bus is away: whether the key opens something is not known yet
                continue
            try:
                return AttemptKey.decode(read.value or b"")
            except msgspec.MsgspecError:
                return None
