"""A fact is something that happened: frozen, named in the past tense, told once.

Promises: each fact knows its subject, and the subject ends in the fact's natural key, so that a
stream refuses a second telling; bytes written by an older version still decode.
"""

import re
from typing import Any, ClassVar, Self

import msgspec

SCHEMA_VERSION = 1

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,128}")


class BadKey(ValueError):
    """A name cannot be a token of a subject."""


def token(field: str, value: str | int) -> str:
    """One subject token; raises `BadKey` naming the field, the value and what is allowed."""
    text = str(value)
    if not _TOKEN.fullmatch(text):
        raise BadKey(f"{field} = {text!r} cannot be part of a subject: use 1 to 128 of A-Z a-z 0-9 _ -")
    return text


class Fact(msgspec.Struct, frozen=True, kw_only=True, tag_field="fact"):
    """The root of all facts. `kind` is the stream a fact lives on."""

    kind: ClassVar[str] = ""
    name: ClassVar[str] = ""
    key_length: ClassVar[int] = 1
    registry: ClassVar[dict[str, type["Fact"]]] = {}
    seams: ClassVar[tuple[str, ...]] = ()
    """Fields, in their order, at which bytes of another nature begin (text after packed numbers): packed apart, both
    become smaller. Where this is empty, nothing is known of the bytes."""

    run: str
    schema: int = SCHEMA_VERSION

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Fact.registry[cls.__name__] = cls

    def key(self) -> tuple[str | int, ...]:
        """What makes this telling the only one of its name within the run."""
        raise NotImplementedError

    def repeats(self) -> bool:
        """Whether long stretches of the bytes come more than once, so that packing them pays."""
        return False

    def subject(self) -> str:
        return self.subject_for(self.run, *self.key())

    @classmethod
    def subject_for(cls, run: str, *key: str | int) -> str:
        """The one subject on which the fact with this natural key is told."""
        parts = [token("run", run), cls.kind, cls.name, *(token("key", part) for part in key)]
        return "of." + ".".join(part for part in parts if part)

    @classmethod
    def filter_for(cls, run: str = "*", *key: str | int) -> str:
        """The subjects of all facts of this name whose key begins with `key`; run `*` is any run.

        With the whole key it is the subject itself, and only then.
        """
        head = "of.*" if run == "*" else f"of.{token('run', run)}"
        parts = [head, cls.kind, cls.name, *(token("key", part) for part in key)]
        return ".".join(part for part in parts if part) + (".>" if len(key) < cls.key_length else "")

    def encode(self) -> bytes:
        return _ENCODER.encode(self)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Self:
        """Decode bytes told as exactly this fact; raises `msgspec.DecodeError` otherwise."""
        return msgspec.msgpack.decode(data, type=cls)


_ENCODER = msgspec.msgpack.Encoder()


class Span(msgspec.Struct, frozen=True, array_like=True):
    """`length` positions from `start`."""

    start: int
    length: int


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """`length` positions from `start` that were sampled by weight version `version`."""

    start: int
    length: int
    version: int


class BlobRef(msgspec.Struct, frozen=True):
    """Bytes that are too large to tell: their sha256 (hex) and their size."""

    digest: str
    size: int
