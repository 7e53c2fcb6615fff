"""Two managers and one nats-server: clients talk to either, and the sandboxes of a dead one are forgotten."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sandbox_clients import KEY, ReplyDropper, SdkLikeClient
from sandbox_drivers import full_driver

from openforge.bus import Bus
from openforge.sandbox_manager.api import registry
from openforge.sandbox_manager.api.serve import Api
from openforge.sandbox_manager.api.settings import ApiSettings


@pytest.fixture
async def two(bus: Bus, tmp_path: Path) -> AsyncIterator[tuple[Api, Api]]:
    made: list[tuple[Api, Any]] = []
    for name in ("one", "two"):
        settings = ApiSettings(
            sandbox_api_keys=(KEY,), sandbox_api_memory_mb=256, sandbox_api_disk_mb=16, sandbox_api_boxes=2
        )
        driver = full_driver(tmp_path / "state")
        api = Api(settings, driver, labels={"manager": name}, bus=bus, replica=name)
        made.append((api, driver))
        await api.start()
    yield made[0][0], made[1][0]
    for api, driver in made:
        await api.close()
        await driver.close()


def at(api: Api) -> str:
    return f"http://127.0.0.1:{api.port}"


async def test_a_sandbox_is_driven_through_either_replica(two: tuple[Api, Api]) -> None:
    async with SdkLikeClient(at(two[0])) as first, SdkLikeClient(at(two[1])) as second:
        sandbox = (await first.create(sandbox_id="shared"))["sandbox_id"]
        assert (await second.request("GET", f"/sandboxes/{sandbox}"))["replica"] == "one"
        for client in (first, second):
            assert [one["sandbox_id"] for one in (await client.request("GET", "/sandboxes"))["sandboxes"]] == ["shared"]
        job = await second.exec(sandbox, "echo hello > file; cat file; exit 3")
        assert (job["stdout"], job["exit_code"]) == ("hello\n", 3)
        assert (await second.request("GET", f"/jobs/{job['job_id']}"))["stdout"] == "hello\n"
        got = await second.request("GET", f"/sandboxes/{sandbox}/files", params={"path": "/workspace/file"})
        assert got["size"] == 6
        terminal = await second.terminal(sandbox, ["/bin/sh"])
        await terminal.type(b"echo $((6*7)); exit 4\n")
        await terminal.until("stdout", b"42")
        assert (await terminal.until("exit"))["code"] == 4
        assert (await second.status_of("POST", "/sandboxes", json={"image": "x", "sandbox_id": "shared"}))[0] == 409
        dropper = ReplyDropper(two[1].port, drops=3)
        await dropper.start()
        async with SdkLikeClient(dropper.url) as unlucky:
            assert (await unlucky.exec(sandbox, "echo x >> starts; cat starts"))["stdout"] == "x\n"
        dropper.stop()
        await second.request("DELETE", f"/sandboxes/{sandbox}")
        assert (await first.status_of("GET", f"/sandboxes/{sandbox}"))[0] == 404


async def test_a_full_replica_hands_on_what_it_cannot_take(two: tuple[Api, Api]) -> None:
    async with SdkLikeClient(at(two[0])) as client:
        made = [await client.create() for _ in range(3)]
        assert [one["replica"] for one in made] == ["one", "one", "two"]
        assert (await client.exec(made[2]["sandbox_id"], "echo there"))["stdout"] == "there\n"


async def test_what_a_silent_replica_had_is_forgotten(two: tuple[Api, Api], bus: Bus) -> None:
    lost = registry.Shared(*[await bus.bucket(name) for name in ("of_sandboxes", "of_sandbox_replicas")], "lost", "")
    await lost.tell(1)
    assert await lost.claim("orphan", registry.Entry(replica="lost"))
    mine = two[1]._registry
    assert isinstance(mine, registry.Shared)
    assert not await mine.claim("orphan", registry.Entry(replica="two"))
    assert await mine.forget_the_dead() == 0
    await lost.leave()  # as if it had been silent for long
    assert await mine.forget_the_dead() == 1
    claims = await asyncio.gather(*(mine.claim("orphan", registry.Entry(replica="two")) for _ in range(4)))
    assert sorted(claims) == [False, False, False, True]
