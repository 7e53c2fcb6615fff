"""The three places where weights are published, on real servers: each keeps what `stores` and `cache` promise."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from credentials_world import World, world_at
from engine_fixtures import publish_adapters
from flaky_network import FlakyNetwork
from learner_world import LearnerProcess, feed_run, is_published, newest_published, run_config, tiny_model, until
from s3_server import BUCKET, S3Server

from openforge.bus import Bus, BusSettings, StreamLimits
from openforge.bus.lookup import subjects_on
from openforge.bus.permissions import OPERATOR
from openforge.models import tiny
from openforge.protos import PolicyPublished
from openforge.runs import submit
from openforge.weights import BASE, MANIFEST, BadWeights, Written, check, read_manifest, write_weights
from openforge.weights.adapters import base_of
from openforge.weights.cache import Cache
from openforge.weights.objects import Objects, StoreBroken, StoreRefused
from openforge.weights.s3 import S3Objects
from openforge.weights.stores import Store, store_at

RUN = "lineage"
PIECE = 8 << 20


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model") / "tiny", hidden=32, layers=1, heads=2, kv_heads=1)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with world_at(tmp_path) as world:
        async with world.bus(OPERATOR) as bus:
            await bus.set_up()
        yield world


class Place:
    """Where is published, as a learner and as engines see it, each with its own rights."""

    def __init__(self, where: str, folder: Path, world: World, s3: S3Server, patch: pytest.MonkeyPatch) -> None:
        self.where, self.folder = where, folder
        self._world, self._s3, self._patch = world, s3, patch

    @asynccontextmanager
    async def seen_by(self, who: str) -> AsyncIterator[Bus]:
        """The bus of `learner`, `engine`, or `stranger`, who may neither; S3 with the keys of the same."""
        async with self._world.bus("verifier" if who == "stranger" else who) as bus:
            for name, value in self._s3.env(who).items():
                self._patch.setenv(name, value)
            yield bus

    @asynccontextmanager
    async def objects(self, who: str) -> AsyncIterator[Objects]:
        async with self.seen_by(who) as bus:
            yield bus.weights if self.where == "nats" else S3Objects(self.where)

    @asynccontextmanager
    async def store(self, who: str = "learner", run: str = RUN) -> AsyncIterator[Store]:
        async with self.seen_by(who) as bus:
            yield store_at(self.where, run, self.folder / "own", bus.weights)

    @asynccontextmanager
    async def cache(self, who: str = "engine") -> AsyncIterator[Cache]:
        async with self.seen_by(who) as bus:
            cache = Cache(self.folder / "cache", bus.weights)
            yield cache
            cache.close()


REMOTE = ("s3", "nats")


def place_of(kind: str, tmp_path: Path, world: World, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Place:
    # each test has a prefix of its own
    where = {"folder": str(tmp_path / "shared"), "s3": f"s3://{BUCKET}/{tmp_path.name}", "nats": "nats"}[kind]
    return Place(where, tmp_path, world, s3_server, monkeypatch)


@pytest.fixture(params=("folder", *REMOTE))
def place(
    request: pytest.FixtureRequest, tmp_path: Path, world: World, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> Place:
    return place_of(request.param, tmp_path, world, s3_server, monkeypatch)


@pytest.fixture(params=REMOTE)
def remote(
    request: pytest.FixtureRequest, tmp_path: Path, world: World, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> Place:
    return place_of(request.param, tmp_path, world, s3_server, monkeypatch)


def write(place: Place, model: Path, version: int, *, incarnation: int = 0, numbers: int = 1000) -> Written:
    tensors = {"model.embed_tokens.weight": torch.arange(float(numbers)).reshape(-1, 10) + version}
    return write_weights(
        place.folder / "home",
        tensors,
        config_dir=model,
        version=version,
        incarnation=incarnation,
        probe=None,
        dtype="float32",
    )


def bytes_of(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


# What all keep


async def test_an_engine_gets_what_a_learner_published_byte_for_byte(place: Place, model: Path) -> None:
    written = write(place, model, 1, numbers=200_000)
    async with place.store() as store, place.cache() as cache:
        await store.check()
        location = await store.publish(written.path, written.digest)
        assert await store.publish(written.path, written.digest) == location
        assert await store.has(location, written.digest)
        folder = await cache.folder(location, written.digest)
        assert bytes_of(folder) == bytes_of(written.path)
        check(folder, written.digest)
        assert await cache.folder(location, written.digest) == folder


async def test_another_incarnation_or_other_bytes_are_another_location(place: Place, model: Path) -> None:
    first, again = write(place, model, 1), write(place, model, 1, incarnation=1)
    async with place.store() as store, place.cache() as cache:
        locations = {await store.publish(one.path, one.digest): one for one in (first, again)}
        assert len(locations) == 2
        for location, one in locations.items():
            check(await cache.folder(location, one.digest), one.digest)


async def test_old_versions_go_and_those_that_engines_serve_stay(place: Place, model: Path) -> None:
    written = [write(place, model, version) for version in range(6)]
    async with place.store() as store:
        locations = [await store.publish(one.path, one.digest) for one in written]
        await store.forget_old(2, {"v000001-0"})
        kept = [await store.has(location, one.digest) for location, one in zip(locations, written, strict=True)]
    assert kept == [False, True, False, False, True, True]


async def test_a_learner_starts_only_where_it_can_publish(place: Place) -> None:
    async with place.store() as store:
        await store.check()
        await store.check()


async def test_adapters_come_with_the_weights_below_them_and_those_once(place: Place, model: Path) -> None:
    written = [publish_adapters(place.folder / "home", model, v, place.folder / f"whole-{v}") for v in range(3)]
    async with place.store() as store, place.cache() as cache:
        for one in written:
            location = await store.publish(one.path, one.digest)
            folder = await cache.folder(location, one.digest)
            await cache.serves(folder)
            base = base_of(folder, read_manifest(folder))
            if one is written[0]:
                before = base.stat().st_mtime_ns
            await store.forget_old(1, ())
        assert base.stat().st_mtime_ns == before
        assert bytes_of(base) == bytes_of(place.folder / "home" / BASE)


# What is fetched


async def test_bytes_that_are_not_those_of_the_digest_are_refused_and_named(remote: Place, model: Path) -> None:
    written = write(remote, model, 1)
    spoilt = write(remote, model, 2)
    tensors = spoilt.path / "model.safetensors"
    tensors.write_bytes(bytes(tensors.stat().st_size))
    async with remote.store() as store, remote.cache() as cache:
        location = await store.publish(spoilt.path, spoilt.digest)
        with pytest.raises(BadWeights, match=r"model\.safetensors has blake3 .*, the manifest says"):
            await cache.folder(location, spoilt.digest)
        location = await store.publish(written.path, written.digest)
        with pytest.raises(BadWeights, match=r"the manifest has digest .*, expected 0000"):
            await cache.folder(location, "0" * 64)
        check(await cache.folder(location, written.digest), written.digest)


async def test_weights_that_were_removed_are_refused(remote: Place, model: Path) -> None:
    written, newer = write(remote, model, 1), write(remote, model, 2)
    async with remote.store() as store, remote.cache() as cache:
        location = await store.publish(written.path, written.digest)
        await store.publish(newer.path, newer.digest)
        await store.forget_old(1, ())
        with pytest.raises(BadWeights, match="v000001-0"):
            await cache.folder(location, written.digest)


async def test_a_cache_keeps_what_is_served_and_what_was_before(remote: Place, model: Path) -> None:
    async with remote.store() as store, remote.cache() as cache, remote.cache() as other:
        for version in range(4):
            written = write(remote, model, version)
            location = await store.publish(written.path, written.digest)
            await cache.serves(await cache.folder(location, written.digest))
        elsewhere = await other.folder(location, written.digest)
    folders = sorted(str(path.relative_to(remote.folder / "cache")) for path in (remote.folder / "cache").glob("*/*"))
    assert [name.rpartition("-")[0] for name in folders if "lock" not in name] == [
        "0/v000002-0",
        "0/v000003-0",
        "1/v000003-0",
    ]
    assert elsewhere.parent.name == "1", "two engines never share a folder"


async def test_an_engine_that_was_restarted_finds_its_weights_and_fetches_damaged_ones_again(
    remote: Place, model: Path
) -> None:
    written = write(remote, model, 1)
    async with remote.store() as store:
        location = await store.publish(written.path, written.digest)
        async with remote.cache() as cache:
            folder = await cache.folder(location, written.digest)
        (folder / "config.json").write_bytes(b"{}")
        async with remote.cache() as cache:
            assert await cache.folder(location, written.digest) == folder
            check(folder, written.digest)
        async with remote.cache("stranger") as cache:
            assert await cache.folder(location, written.digest) == folder, "nothing is fetched that is there"


# What breaks


async def test_what_a_crash_left_is_no_version_and_goes_with_the_next_one(remote: Place, model: Path) -> None:
    half, newer = write(remote, model, 1), write(remote, model, 2)
    name = f"{RUN}/v000001-0-{half.digest[:12]}"
    async with remote.objects("learner") as objects, remote.store() as store:
        for file in ("config.json", "model.safetensors"):
            await objects.put(f"{name}/{file}", half.path / file)
        assert not await store.has(f"{objects.url}/{name}", half.digest)
        location = await store.publish(newer.path, newer.digest)
        await store.forget_old(3, ())
        assert await store.has(location, newer.digest)
        left = {name.split("/")[1] for name in await objects.names(f"{RUN}/")}
    assert left == {location.rpartition("/")[2]}


async def test_a_crash_in_mid_upload_is_made_good_by_publishing_again(remote: Place, model: Path) -> None:
    half = write(remote, model, 1)
    async with remote.objects("learner") as objects, remote.store() as store, remote.cache() as cache:
        name = f"{RUN}/v000001-0-{half.digest[:12]}"
        await objects.put(f"{name}/config.json", half.path / "config.json")
        location = await store.publish(half.path, half.digest)
        assert location == f"{objects.url}/{name}"
        check(await cache.folder(location, half.digest), half.digest)


async def test_runs_do_not_touch_one_another(remote: Place, model: Path) -> None:
    written = write(remote, model, 1)
    async with remote.store() as mine, remote.store(run="other") as theirs:
        location = await theirs.publish(written.path, written.digest)
        newer = write(remote, model, 2)
        await mine.publish(newer.path, newer.digest)
        await mine.forget_old(1, ())
        assert await theirs.has(location, written.digest)


async def test_who_may_not_write_is_told_before_anything_is_trained(remote: Place, model: Path) -> None:
    async with remote.store("engine") as store:
        with pytest.raises(StoreRefused, match=r"may not (write|use)"):
            await store.check()
    written = write(remote, model, 1)
    async with remote.store() as store:
        location = await store.publish(written.path, written.digest)
    async with remote.cache("stranger") as cache:
        with pytest.raises(StoreRefused, match=r"may not (read|use)"):
            await cache.folder(location, written.digest)


async def test_a_place_that_is_not_there_is_named(
    world: World, s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.bus(OPERATOR) as bus:
        await bus.link.ask_api("STREAM.DELETE.OBJ_of_weights")
        bus.link.settings = BusSettings(connect_timeout_s=0.1)
        with pytest.raises(StoreRefused, match="bus set-up"):
            await store_at("nats", RUN, tmp_path, bus.weights).check()
    for name, value in s3_server.env("operator").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreRefused, match="there is no bucket 'elsewhere': make it"):
        await S3Objects("s3://elsewhere/x").names(f"{RUN}/")


async def test_keys_that_are_wrong_and_no_keys_are_refused_with_the_way_out(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (s3_server.env("learner") | {"AWS_SECRET_ACCESS_KEY": "wrong"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreRefused, match="set AWS_ACCESS_KEY_ID"):
        await S3Objects(f"s3://{BUCKET}").check(RUN)


async def test_a_store_that_is_down_is_broken_and_not_refused(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (s3_server.env("learner") | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreBroken):
        await S3Objects(f"s3://{BUCKET}").check(RUN)


async def test_a_full_store_of_the_bus_says_so_instead_of_waiting(
    world: World, s3_server: S3Server, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = msgspec.structs.replace(world.settings(OPERATOR), streams=StreamLimits(weights_max_bytes=100_000))
    async with Bus.connect(small, name=OPERATOR) as bus:
        await bus.set_up()
    place = Place("nats", tmp_path, world, s3_server, monkeypatch)
    written = write(place, model, 1, numbers=100_000)
    async with place.store() as store:
        with pytest.raises(StoreRefused, match="OPENFORGE_WEIGHTS_MAX_BYTES"):
            await store.publish(written.path, written.digest)


async def test_a_download_goes_on_where_it_broke_off(
    world: World, s3_server: S3Server, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(f"s3://{BUCKET}/{tmp_path.name}", tmp_path, world, s3_server, monkeypatch)
    written = write(place, model, 1, numbers=2_500_000)  # ten megabytes: two pieces
    async with place.store() as store, place.cache() as cache:
        location = await store.publish(written.path, written.digest)
        draft = tmp_path / "cache" / "0" / f".{location.rpartition('/')[2]}"
        draft.mkdir(parents=True)
        begun = draft / "model.safetensors"
        begun.write_bytes((written.path / begun.name).read_bytes()[:PIECE])
        inode = begun.stat().st_ino
        folder = await cache.folder(location, written.digest)
        assert (folder / begun.name).stat().st_ino == inode, "the beginning was kept"
        check(folder, written.digest)


async def test_a_line_that_breaks_during_a_fetch_is_broken_and_then_mended(
    world: World, s3_server: S3Server, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(f"s3://{BUCKET}/{tmp_path.name}", tmp_path, world, s3_server, monkeypatch)
    written = write(place, model, 1)
    network = FlakyNetwork(s3_server.port)
    await network.start()
    async with place.store() as store, place.cache() as cache:
        location = await store.publish(written.path, written.digest)
        for name, value in s3_server.env("engine", network.port).items():
            monkeypatch.setenv(name, value)
        network.cut()
        with pytest.raises(StoreBroken):
            await cache.folder(location, written.digest)
        network.heal()
        check(await cache.folder(location, written.digest), written.digest)
    await network.close()


# The learner's own process


async def test_a_learner_killed_in_mid_upload_publishes_the_same_version_whole(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its network goes deaf within the second file of version 1: one and a piece are there, and no manifest."""
    config = run_config(tiny_model(tmp_path), RUN, run={"steps": 2}, weights={"store": "nats"})
    network = FlakyNetwork(world.server.config.port)
    await network.start()
    async with world.bus(OPERATOR) as bus, world.bus("engine") as engine:
        await submit(bus, config)
        learner = LearnerProcess(BusSettings(url=network.url), tmp_path / "home", RUN)
        monkeypatch.setenv("OPENFORGE_NATS_NKEY_SEED_FILE", str(world.credentials.seed("learner")))
        await learner.start()
        await until(lambda: is_published(bus, RUN, 0))
        network.hold_at(b"HPUB $O.of_weights.M.", passes=1)
        feeding = asyncio.create_task(feed_run(bus, config))
        async with asyncio.timeout(600):
            await network.held.wait()
        await learner.kill()
        names = await bus.weights.names(f"{RUN}/v000001")
        assert len(names) == 1
        assert not names[0].endswith(MANIFEST)
        assert await bus.read(PolicyPublished, RUN, 1) == []
        network.heal()
        await learner.start()
        await feeding
        await until(lambda: is_published(bus, RUN, 2))
        assert await learner.stop() == 0
        published = await newest_published(bus, RUN)
        cache = Cache(tmp_path / "cache", engine.weights)
        check(await cache.folder(published.location, published.digest), published.digest)
        [one] = await bus.read(PolicyPublished, RUN, 1)
        check(await cache.folder(one.fact.location, one.fact.digest), one.fact.digest)
        objects = await bus.weights.names(f"{RUN}/")
        chunks = await subjects_on(bus.link, "OBJ_of_weights", "$O.of_weights.C.>")
        assert len(chunks) == len(objects), "each belongs to an object"
        cache.close()
    await network.close()
