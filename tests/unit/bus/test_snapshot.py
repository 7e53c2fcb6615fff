"""Snapshots and blobs come back as they were."""

import asyncio
import secrets

import pytest
from nats.js.errors import KeyNotFoundError

from openforge.blobs import BlobLost
from openforge.bus import Bus, Cursors, Snapshot
from openforge.bus.server import NatsServer
from openforge.bus.streams import BLOB_STORE
from openforge.protos import BlobRef

CURSORS = Cursors({"run": 3, "turn": 12})


async def test_a_snapshot_is_recalled_as_it_was_remembered(bus: Bus) -> None:
    assert await bus.recall("scheduler.r") is None
    await bus.remember("scheduler.r", Snapshot(state=b"old", cursors=Cursors()))
    await bus.remember("scheduler.r", Snapshot(state=b"new", cursors=CURSORS))
    assert await bus.recall("scheduler.r") == Snapshot(state=b"new", cursors=CURSORS)


async def test_a_snapshot_survives_a_kill_of_the_server(bus: Bus, nats_server: NatsServer) -> None:
    await bus.remember("a", Snapshot(state=b"state", cursors=CURSORS))
    await nats_server.kill()
    await nats_server.start()
    assert await bus.recall("a") == Snapshot(state=b"state", cursors=CURSORS)


async def test_a_snapshot_above_the_largest_payload_lies_in_the_blobs_and_replaces_the_one_before(bus: Bus) -> None:
    for _ in range(3):
        state = secrets.token_bytes(9 << 20)
        await bus.remember("a", Snapshot(state=state, cursors=CURSORS))
        assert await bus.recall("a") == Snapshot(state=state, cursors=CURSORS)
    assert (await bus.link.js.stream_info(f"OBJ_{BLOB_STORE}")).state.bytes < 12 << 20


@pytest.mark.parametrize("size", [0, 1, 128 * 1024, 128 * 1024 + 1, 3_000_000])
async def test_a_blob_comes_back_as_it_was(bus: Bus, size: int) -> None:
    data = secrets.token_bytes(size)
    ref = await bus.blobs.put(data)
    assert ref.size == size
    assert await bus.blobs.get(ref) == data


async def test_the_same_blob_is_stored_once(bus: Bus) -> None:
    data = secrets.token_bytes(1 << 20)
    assert await bus.blobs.put(data) == await bus.blobs.put(data)
    assert (await bus.link.js.stream_info(f"OBJ_{BLOB_STORE}")).state.bytes < 1.1 * len(data)


async def test_a_blob_that_is_not_there_is_lost_and_says_so(bus: Bus) -> None:
    with pytest.raises(BlobLost, match="0000"):
        await bus.blobs.get(BlobRef("0" * 64, 10))


async def test_a_deleted_blob_is_gone_and_can_be_put_again(bus: Bus) -> None:
    ref = await bus.blobs.put(b"bytes")
    await bus.blobs.delete(ref)
    await bus.blobs.delete(ref)
    with pytest.raises(BlobLost):
        await bus.blobs.get(ref)
    await bus.blobs.put(b"bytes")
    assert await bus.blobs.get(ref) == b"bytes"


async def test_any_client_reads_the_blobs(bus: Bus) -> None:
    data = secrets.token_bytes(300_000)
    ref = await bus.blobs.put(data)
    store = await bus.link.js.object_store(BLOB_STORE)
    assert (await store.get(ref.digest)).data == data


async def test_a_bucket_is_made_when_first_asked_for(bus: Bus) -> None:
    bucket = await bus.bucket("of_test")
    await bucket.put("a.b", b"1")
    assert (await (await bus.bucket("of_test")).get("a.b")).value == b"1"


async def test_a_bucket_is_read_and_written_over_a_kill_of_the_server(bus: Bus, nats_server: NatsServer) -> None:
    bucket = await bus.bucket("of_test")
    await bucket.put("a", b"1")
    await nats_server.kill()
    putting = asyncio.create_task(bucket.put("b", b"2"))
    getting = asyncio.create_task(bucket.get("a"))
    await asyncio.sleep(0.2)
    await nats_server.start()
    async with asyncio.timeout(10):
        await putting
        assert (await getting).value == b"1"
        assert (await bucket.get("b")).value == b"2"


async def test_a_key_that_is_not_there_or_was_deleted_is_not_found(bus: Bus) -> None:
    bucket = await bus.bucket("of_test")
    with pytest.raises(KeyNotFoundError):
        await bucket.get("a")
    await bucket.put("a", b"1")
    await bucket.delete("a")
    with pytest.raises(KeyNotFoundError):
        await bucket.get("a")
