"""Each role's credentials on a real server: what it needs works, everything else is denied."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import nats
import pytest
from credentials_world import World, world_at
from fact_examples import ATTEMPT_KEY, FACTS, RUN
from nats.js.errors import KeyNotFoundError

from openforge.bus import CAUGHT_UP, KINDS, Bus, BusError, BusSettings, Cursors, Denied, Snapshot, Told
from openforge.bus.credentials import Credentials
from openforge.bus.permissions import CONSUMER, OPERATOR, ROLES
from openforge.bus.work import consumer_name
from openforge.client import Client
from openforge.protos import KEY_BUCKET, EpisodeSealed, Fact, TrajectoryVerified, TurnRecorded

STREAMS = [kind.upper() for kind in KINDS]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with world_at(tmp_path, consumers=["mine", "yours"]) as world:
        async with world.bus(OPERATOR) as bus:
            await bus.set_up()
        yield world


async def denied(bus: Bus, subject: str) -> bool:
    """Whether the server refuses a message on this subject. One that it takes has no answer, or an error of the API."""
    try:
        async with asyncio.timeout(1.0):
            await (await bus.link.send(subject, b""))
    except Denied:
        return True
    except Exception:
        return False
    return False


def of_others(role: str) -> Iterator[str]:
    """What others of the table do and this role must not, and what no service may do."""
    for other, theirs in ROLES.items():
        if other == role:
            continue
        yield f"of.dead.{other}"
        for fact in theirs.works:
            name = consumer_name(other, fact)
            stream = fact.kind.upper()
            yield f"$JS.API.CONSUMER.CREATE.{stream}.{name}"
            yield f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}"
            yield f"$JS.API.CONSUMER.DELETE.{stream}.{name}"
            yield f"$JS.ACK.{stream}.{name}.1.1.1.1.0"
    for stream in (*STREAMS, f"KV_{KEY_BUCKET}", "OBJ_of_blobs", "OBJ_of_weights"):
        yield f"$JS.API.STREAM.DELETE.{stream}"
        yield f"$JS.API.STREAM.UPDATE.{stream}"
        yield f"$JS.API.STREAM.MSG.DELETE.{stream}"
    yield from (f"$JS.API.STREAM.PURGE.{stream}" for stream in STREAMS)
    yield "$KV.of_cursors.mine"
    yield "$JS.API.CONSUMER.NAMES.EPISODE"
    if not (role in ROLES and ROLES[role].keys):
        yield f"$JS.API.DIRECT.GET.KV_{KEY_BUCKET}"
        yield f"$JS.API.DIRECT.GET.KV_{KEY_BUCKET}.$KV.{KEY_BUCKET}.a.b"
        yield f"$JS.API.STREAM.MSG.GET.KV_{KEY_BUCKET}"
        yield f"$JS.API.CONSUMER.CREATE.KV_{KEY_BUCKET}.x"
    if not (role in ROLES and ROLES[role].keys == "writes"):
        yield f"$KV.{KEY_BUCKET}.{RUN}.{'ab' * 32}"
    if not (role in ROLES and ROLES[role].weights):
        yield "$JS.API.DIRECT.GET.OBJ_of_weights"
        yield "$JS.API.DIRECT.GET.OBJ_of_weights.$O.of_weights.M.a"
        yield "$JS.API.STREAM.MSG.GET.OBJ_of_weights"
        yield "$JS.API.STREAM.INFO.OBJ_of_weights"
    if not (role in ROLES and ROLES[role].weights == "writes"):
        yield "$O.of_weights.M.a"
        yield "$O.of_weights.C.a"
        yield "$JS.API.STREAM.PURGE.OBJ_of_weights"
    if not (role in ROLES and ROLES[role].remembers):
        yield "$KV.of_snapshots.scheduler.all"


async def test_each_fact_is_told_by_one_service_and_denied_to_every_other(world: World) -> None:
    told: list[Fact] = []
    for role in (*ROLES, CONSUMER):
        async with world.bus(role, "mine" if role == CONSUMER else "") as bus:
            for fact in FACTS:
                if role in ROLES and type(fact) in ROLES[role].tells:
                    await bus.tell(fact)
                    told.append(fact)
                else:
                    with pytest.raises(Denied, match="of the role that may"):
                        await bus.tell(fact)
    assert sorted(type(fact).__name__ for fact in told) == sorted(
        type(fact).__name__ for fact in FACTS if fact.kind != "run"
    )  # each once; what clients say of a run is the operator's


@pytest.mark.parametrize("role", [*ROLES, CONSUMER])
async def test_what_others_do_is_denied(world: World, role: str) -> None:
    async with world.bus(role, "yours" if role == CONSUMER else "") as bus:
        taken = [subject for subject in of_others(role) if not await denied(bus, subject)]
    assert taken == []


async def test_nobody_but_the_operator_hears_what_is_for_others(world: World) -> None:
    for role, name in [*((role, "") for role in ROLES), (CONSUMER, "mine")]:
        errors: list[str] = []

        async def heard(error: Exception, errors: list[str] = errors) -> None:
            errors.append(str(error))

        seed = str(world.credentials.seed(role, name))
        client = await nats.connect(world.server.url, nkeys_seed=seed, error_cb=heard)
        for subject in (">", "of.>", "_INBOX.>", f"$KV.{KEY_BUCKET}.>", "$JS.ACK.>"):
            await client.subscribe(subject)
        async with asyncio.timeout(10):
            while len([error for error in errors if "permissions violation for subscription" in error]) < 5:
                await asyncio.sleep(0.02)
        await client.close()


async def test_services_do_their_work_with_their_own_credentials(world: World) -> None:
    sealed = next(fact for fact in FACTS if isinstance(fact, EpisodeSealed))
    turn = next(fact for fact in FACTS if isinstance(fact, TurnRecorded))
    verdict = next(fact for fact in FACTS if isinstance(fact, TrajectoryVerified))
    handled = asyncio.Event()

    async def verify(told: Told[EpisodeSealed]) -> AsyncIterator[Fact]:
        yield verdict
        handled.set()

    async with (
        world.bus("proxy") as proxy,
        world.bus("verifier") as verifier,
        world.bus("sandbox_manager") as manager,
        world.bus("scheduler") as scheduler,
    ):
        for bus in (proxy, verifier, manager, scheduler):
            await bus.set_up()  # may not make streams, finds them made
        await proxy.tell(turn)
        await proxy.tell(sealed)
        working = asyncio.create_task(verifier.work(service="verifier", fact=EpisodeSealed, handler=verify))
        await handled.wait()
        assert await verifier.count(TurnRecorded, RUN, turn.episode, turn.attempt) == 1
        followed = [told async for told in scheduler.follow(("episode", "trajectory"), run=RUN, until_now=True)]
        assert [told.fact for told in followed if told is not CAUGHT_UP] == [sealed, verdict]
        await scheduler.remember("scheduler.all", Snapshot(state=b"s", cursors=Cursors({"run": 1})))
        assert (await scheduler.recall("scheduler.all")).state == b"s"
        await (await manager.bucket(KEY_BUCKET)).put("demo.ab", ATTEMPT_KEY.encode())
        assert (await (await proxy.bucket(KEY_BUCKET)).get("demo.ab")).value == ATTEMPT_KEY.encode()
        with pytest.raises(KeyNotFoundError):
            await (await proxy.bucket(KEY_BUCKET)).get("demo.cd")
        ref = await manager.blobs.put(b"artifacts")
        assert await verifier.blobs.get(ref) == b"artifacts"
        await asyncio.sleep(0.2)
        working.cancel()
        await asyncio.wait({working})
    async with world.bus(OPERATOR) as bus:
        info = await bus.link.ask_api("CONSUMER.INFO.EPISODE.verifier-EpisodeSealed")
        assert (info["num_ack_pending"], info["ack_floor"]["stream_seq"]) == (0, 1)


async def test_a_consumer_reads_everything_and_moves_its_own_cursor_only(world: World) -> None:
    async with world.bus(OPERATOR) as bus:
        await bus.tell_all(FACTS)
        blob = await bus.blobs.put(b"large")
    async with Client.connect(settings=world.settings(CONSUMER, "mine")) as client:
        trajectories = [told.fact async for told in client.trajectories(name="mine", until_now=True)]
        assert [type(fact) for fact in trajectories] == [TrajectoryVerified]
        assert [told async for told in client.trajectories(name="mine", until_now=True)] == []
        assert len([told async for told in client.policy(until_now=True)]) == 5
        reading = client.trajectories(name="yours")
        await anext(reading)
        with pytest.raises(Denied):
            await reading.done()
        with pytest.raises(Denied):
            await client.forget("yours")
    async with world.bus(CONSUMER, "mine") as bus:
        assert await bus.blobs.get(blob) == b"large"
        with pytest.raises(Denied):
            await anext(bus.follow(("trajectory",)))
        with pytest.raises(Denied):
            await bus.blobs.put(b"mine")


async def test_a_service_waits_for_streams_that_it_may_not_make(tmp_path: Path) -> None:
    async with world_at(tmp_path) as world, world.bus("engine") as engine, world.bus(OPERATOR) as operator:
        waiting = asyncio.create_task(engine.set_up())
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await operator.set_up()
        await waiting
        await operator.link.ask_api("STREAM.DELETE.TURN")
        engine.link.settings = BusSettings(connect_timeout_s=0.1)
        with pytest.raises(BusError, match=r"TURN are missing.*openforge bus set-up"):
            await engine.set_up()


def test_seeds_stay_and_are_for_their_owner_only(tmp_path: Path) -> None:
    credentials = Credentials(tmp_path / "keys", run="r")
    first = {seed.name: seed.read_text() for seed in credentials.make()}
    assert set(first) == {"operator.nk", *(f"{role}.nk" for role in ROLES)}
    second = {seed.name: seed.read_text() for seed in credentials.make(["me"])}
    assert second.items() >= first.items()
    assert set(second) - set(first) == {"consumer-me.nk"}
    for file in (tmp_path / "keys").iterdir():
        assert file.stat().st_mode & 0o077 == 0
    assert "verifier-EpisodeSealed-r" in credentials.users.read_text()
