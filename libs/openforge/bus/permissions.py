"""Who may say what on the bus: one table, from which a server's permissions are made.

Promises: a service may tell its own facts and no others', work for itself and not for others, read what it needs; a
consumer may read facts and blobs, move its own cursor, and nothing else; nobody hears answers that are for others.

What a role may read is coarse: a stream wholly or not at all, all blobs or none. A role that follows a stream may
make readers there, so it could disturb other readers of that stream (not forge facts, nor take workers' messages).
"""

from collections.abc import Iterator
from typing import Literal

import msgspec

from openforge.bus.errors import BusError
from openforge.bus.link import inbox_of
from openforge.bus.streams import BLOB_STORE, CURSOR_BUCKET, DEAD, KINDS, SNAPSHOT_BUCKET, WEIGHT_STORE, stream_of
from openforge.bus.work import consumer_name
from openforge.protos import (
    KEY_BUCKET,
    BatchTrained,
    EngineMeasured,
    EpisodeEnded,
    EpisodeFailed,
    EpisodeRequested,
    EpisodeSealed,
    EpisodeStarted,
    Fact,
    GroupClosed,
    GroupOpened,
    PolicyPublished,
    PolicyServed,
    TrajectoryRetired,
    TrajectoryVerified,
    TurnRecorded,
    token,
)

OPERATOR = "operator"
CONSUMER = "consumer"


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """`tells` facts, `works` on facts, `follows` and `reads` kinds. `keys`: what it does with hashes of model keys;
    `weights`: what it does with the store of weights.
    """

    tells: tuple[type[Fact], ...] = ()
    works: tuple[type[Fact], ...] = ()
    follows: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    keys: Literal["", "reads", "writes"] = ""
    weights: Literal["", "reads", "writes"] = ""
    remembers: bool = False


ROLES = {
    "scheduler": Role(
        tells=(GroupOpened, EpisodeRequested, GroupClosed),
        follows=("run", "group", "episode", "trajectory", "policy"),
        remembers=True,
    ),
    "sandbox_manager": Role(
        tells=(EpisodeStarted, EpisodeEnded),
        works=(EpisodeRequested,),
        follows=("run",),
        reads=("episode", "turn"),
        keys="writes",
    ),
    "proxy": Role(
        tells=(TurnRecorded, EpisodeSealed),
        works=(EpisodeEnded,),
        follows=("run", "episode", "policy"),
        reads=("turn",),
        keys="reads",
    ),
    "engine": Role(tells=(PolicyServed, EngineMeasured), follows=("run", "policy"), weights="reads"),
    "verifier": Role(
        tells=(TrajectoryVerified, EpisodeFailed),
        works=(EpisodeSealed,),
        follows=("run",),
        reads=("episode", "turn", "trajectory"),
    ),
    "learner": Role(
        tells=(BatchTrained, TrajectoryRetired, PolicyPublished),
        follows=("run", "group", "trajectory", "policy"),
        weights="writes",
    ),
    "metrics": Role(follows=KINDS),
}
"""The services, and `metrics` for `openforge metrics`. Beside them: `operator`, who may do everything, and `consumer`,
who reads.
"""


class UnknownRole(BusError):
    """There is no such role."""


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """What the holder of an nkey may publish and subscribe to; `key` is its public half."""

    key: str
    publish: tuple[str, ...]
    never: tuple[str, ...] = ()
    subscribe: tuple[str, ...]


def grant(role: str, key: str, *, name: str = "", run: str = "*") -> Grant:
    """The grant of a role. A consumer's `name` is the one name under which it may resume; a `run` binds the names of
    workers to it, as `OPENFORGE_RUN` does. Raises `UnknownRole`.
    """
    if role == OPERATOR:
        return Grant(key=key, publish=(">",), subscribe=(">",))
    mine = (f"{inbox_of(key)}.>",)
    if role == CONSUMER:
        return Grant(key=key, publish=tuple(_consumes(name)), subscribe=mine)
    if role not in ROLES:
        raise UnknownRole(f"role {role!r} is none: use one of {', '.join([*ROLES, OPERATOR, CONSUMER])}")
    publish = tuple(dict.fromkeys(_serves(role, ROLES[role], run)))
    return Grant(key=key, publish=publish, never=tuple(_others_work(role, run)), subscribe=mine)


def _consumes(name: str) -> Iterator[str]:
    for kind in KINDS:
        yield from _reads(stream_of(kind))
    yield from _reads(f"OBJ_{BLOB_STORE}")
    if name:
        yield f"$KV.{CURSOR_BUCKET}.{token('name', name)}"
        yield from _reads(f"KV_{CURSOR_BUCKET}")


def _serves(service: str, role: Role, run: str) -> Iterator[str]:
    yield "$JS.API.STREAM.NAMES"
    yield f"of.dead.{service}"
    yield from _reads(DEAD)
    yield f"$O.{BLOB_STORE}.>"  # a large fact is a blob
    yield from _reads(f"OBJ_{BLOB_STORE}")
    for fact in role.tells:
        yield fact.filter_for()
        yield from _reads(stream_of(fact.kind))  # whoever is refused looks whether it was itself
    for fact in role.works:
        yield from _works(service, fact, run)
    for kind in role.reads:
        yield from _reads(stream_of(kind))
    for kind in role.follows:
        yield from _follows(stream_of(kind))
    if role.keys:
        yield from _reads(f"KV_{KEY_BUCKET}")
    if role.keys == "writes":
        yield f"$KV.{KEY_BUCKET}.>"
    if role.weights:
        yield from _reads(f"OBJ_{WEIGHT_STORE}")
    if role.weights == "writes":
        yield f"$O.{WEIGHT_STORE}.>"
        yield f"$JS.API.STREAM.PURGE.OBJ_{WEIGHT_STORE}"  # versions that nobody needs any more
    if role.remembers:
        yield f"$KV.{SNAPSHOT_BUCKET}.{service}.>"
        yield f"$KV.{SNAPSHOT_BUCKET}.{service}"
        yield from _reads(f"KV_{SNAPSHOT_BUCKET}")
        yield f"$JS.API.STREAM.PURGE.OBJ_{BLOB_STORE}"  # the blob of the snapshot before


def _reads(stream: str) -> Iterator[str]:
    yield f"$JS.API.DIRECT.GET.{stream}"
    yield f"$JS.API.DIRECT.GET.{stream}.>"
    yield f"$JS.API.STREAM.MSG.GET.{stream}"
    yield f"$JS.API.STREAM.INFO.{stream}"


def _follows(stream: str) -> Iterator[str]:
    yield from _reads(stream)
    for act in ("CREATE", "MSG.NEXT", "DELETE"):
        yield f"$JS.API.CONSUMER.{act}.{stream}.*"


def _works(service: str, fact: type[Fact], run: str) -> Iterator[str]:
    stream, name = stream_of(fact.kind), consumer_name(service, fact, run)
    yield f"$JS.API.CONSUMER.CREATE.{stream}.{name}"
    yield f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}"
    yield f"$JS.ACK.{stream}.{name}.>"
    yield f"$JS.ACK.*.*.{stream}.{name}.>"  # with domain and account, as newer servers say it


def _others_work(service: str, run: str) -> Iterator[str]:
    """Consumers that a role's leave to follow would else reach."""
    for other, role in ROLES.items():
        for fact in role.works if other != service else ():
            if fact.kind in ROLES[service].follows:
                for act in ("CREATE", "MSG.NEXT", "DELETE"):
                    name = consumer_name(other, fact, run)
                    yield f"$JS.API.CONSUMER.{act}.{stream_of(fact.kind)}.{name}"
