"""A key-value bucket that waits out breaks: nats-py's, with reading and writing over the link.

Promises: what `put` returned for is found by every `get` that begins later.
"""

from nats.js.errors import KeyNotFoundError
from nats.js.kv import KeyValue

from openforge.bus.link import Link
from openforge.bus.lookup import last_on
from openforge.protos import token

_GONE = ("DEL", "PURGE")


class Bucket(KeyValue):  # type: ignore[misc]  # nats-py's types are not followed
    """`get` raises `nats.js.errors.KeyNotFoundError`; all other methods are nats-py's own and may time out."""

    def __init__(self, link: Link, name: str) -> None:
        super().__init__(name=name, stream=f"KV_{name}", pre=f"$KV.{name}.", js=link.js, direct=True)
        self._link = link
        self._subjects = f"$KV.{name}."

    async def put(self, key: str, value: bytes, validate_keys: bool = True) -> int:
        return (await self._link.publish(self._subject(key), value)).seq

    async def get(self, key: str, revision: int | None = None, validate_keys: bool = True) -> KeyValue.Entry:
        if revision is not None:
            return await super().get(key, revision, validate_keys)
        message = await last_on(self._link, self._stream, self._subject(key))
        headers = (message.headers if message else None) or {}
        if message is None or headers.get("KV-Operation") in _GONE:
            raise KeyNotFoundError
        return KeyValue.Entry(
            bucket=self._name,
            key=key,
            value=message.data or None,
            revision=int(headers["Nats-Sequence"]),
            delta=None,
            created=None,
            operation=None,
        )

    def _subject(self, key: str) -> str:
        return self._subjects + ".".join(token("key", part) for part in key.split("."))
