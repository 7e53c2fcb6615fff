"""The streams, buckets and stores of a deployment, made in one place.

Promises: `set_up` may run any number of times and from many processes at once; running it with other
limits changes the limits and nothing else.
"""

import asyncio
import time

from nats.js import api
from nats.js.errors import APIError, NotFoundError

from openforge.bus.errors import BusError, Denied
from openforge.bus.link import Link
from openforge.bus.settings import StreamLimits
from openforge.protos import KEY_BUCKET

KINDS = ("run", "group", "episode", "turn", "trajectory", "policy")
DEAD = "DEAD"
DEAD_SUBJECTS = "of.dead.*"
SNAPSHOT_BUCKET = "of_snapshots"
CURSOR_BUCKET = "of_cursors"
BLOB_STORE = "of_blobs"
WEIGHT_STORE = "of_weights"
_IN_USE = 10058  # stream name already in use with a different configuration


def stream_of(kind: str) -> str:
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is no kind of fact: use one of {', '.join(KINDS)}")
    return kind.upper()


def subjects_of(kind: str, run: str = "*") -> str:
    return f"of.{run}.{kind}.>"


def _fact_stream(name: str, subject: str, limits: StreamLimits) -> api.StreamConfig:
    return api.StreamConfig(
        name=name,
        subjects=[subject],
        storage=api.StorageType.FILE,
        discard=api.DiscardPolicy.NEW,
        max_bytes=limits.max_bytes or -1,
        max_age=limits.max_age_s,
        num_replicas=limits.replicas,
        duplicate_window=_window_s(limits),
        allow_direct=True,
    )


def _window_s(limits: StreamLimits) -> float:
    """The server refuses a window that is longer than the age at which messages go."""
    return min(limits.duplicate_window_s, limits.max_age_s) if limits.max_age_s else limits.duplicate_window_s


def _bucket(name: str, limits: StreamLimits) -> api.StreamConfig:
    return api.StreamConfig(
        name=f"KV_{name}",
        subjects=[f"$KV.{name}.>"],
        storage=api.StorageType.FILE,
        discard=api.DiscardPolicy.NEW,
        max_msgs_per_subject=1,
        num_replicas=limits.replicas,
        allow_rollup_hdrs=True,
        allow_direct=True,
        deny_delete=True,
        allow_msg_ttl=True,
    )


def _object_store(name: str, limits: StreamLimits, max_bytes: int) -> api.StreamConfig:
    return api.StreamConfig(
        name=f"OBJ_{name}",
        subjects=[f"$O.{name}.C.>", f"$O.{name}.M.>"],
        storage=api.StorageType.FILE,
        discard=api.DiscardPolicy.NEW,
        max_bytes=max_bytes or -1,
        num_replicas=limits.replicas,
        allow_rollup_hdrs=True,
        allow_direct=True,
    )


def configs(limits: StreamLimits) -> list[api.StreamConfig]:
    return [
        *(_fact_stream(stream_of(kind), subjects_of(kind), limits) for kind in KINDS),
        _fact_stream(DEAD, DEAD_SUBJECTS, limits),
        _bucket(KEY_BUCKET, limits),
        _bucket(SNAPSHOT_BUCKET, limits),
        _bucket(CURSOR_BUCKET, limits),
        _object_store(BLOB_STORE, limits, limits.max_bytes),
        _object_store(WEIGHT_STORE, limits, limits.weights_max_bytes),
    ]


async def set_up(link: Link, limits: StreamLimits) -> None:
    await _ensure_all(link, configs(limits))


async def ensure_bucket(link: Link, name: str, limits: StreamLimits) -> None:
    await _ensure_all(link, [_bucket(name, limits)])


async def _ensure_all(link: Link, wanted: list[api.StreamConfig]) -> None:
    """Made, or where these credentials may not make them, waited for until somebody else has made them."""
    try:
        for config in wanted:
            await _ensure(link, config)
    except Denied:
        await _expect(link, {str(config.name) for config in wanted})


async def _expect(link: Link, names: set[str]) -> None:
    deadline = time.monotonic() + link.settings.connect_timeout_s
    while missing := names - set((await link.ask_api("STREAM.NAMES")).get("streams") or ()):
        if time.monotonic() > deadline:
            raise BusError(
                f"streams {', '.join(sorted(missing))} are missing and these credentials may not make them: "
                "run `openforge bus set-up` as operator"
            )
        await asyncio.sleep(0.2)


async def _ensure(link: Link, config: api.StreamConfig) -> None:
    wanted = config.as_dict()
    try:
        await link.ask_api(f"STREAM.CREATE.{config.name}", wanted)
    except APIError as error:
        if error.err_code != _IN_USE:
            raise BusError(f"stream {config.name} cannot be made: {error.description}") from error
        await _update(link, config)


async def _update(link: Link, config: api.StreamConfig) -> None:
    try:
        await link.ask_api(f"STREAM.UPDATE.{config.name}", config.as_dict())
    except NotFoundError:
        await _ensure(link, config)
    except APIError as error:
        raise BusError(
            f"stream {config.name} exists and cannot be changed to what is wanted: {error.description}"
        ) from error
