"""What we add to the API, and what happens to requests that cannot be meant."""

import asyncio
import base64
import io
import tarfile
from typing import Any

import pytest
from process_watch import running
from sandbox_clients import SdkLikeClient

from openforge.sandbox_manager.api.serve import Api

pytestmark = pytest.mark.asyncio(loop_scope="module")
OURS, READ = "key-of-ours-alone", "key-that-only-reads"


async def until_gone(client: SdkLikeClient, sandbox: str) -> None:
    async with asyncio.timeout(60):
        while (await client.status_of("GET", f"/sandboxes/{sandbox}"))[0] != 404:
            await asyncio.sleep(0.05)


async def test_a_client_that_crashed_finds_its_sandboxes_by_label_and_owner(client: SdkLikeClient) -> None:
    made = await client.create(labels={"job": "7", "kind": "test"}, owner="finder")
    await client.create(labels={"job": "8"}, owner="finder")
    found = await client.request("GET", "/sandboxes", params=[("label", "job=7"), ("label", "kind=test")])
    assert [one["sandbox_id"] for one in found["sandboxes"]] == [made["sandbox_id"]]
    assert len((await client.request("GET", "/sandboxes", params={"owner": "finder"}))["sandboxes"]) == 2


async def test_a_scoped_key_sees_and_makes_its_own_only(api: Api, client: SdkLikeClient) -> None:
    theirs = (await client.create())["sandbox_id"]
    url = f"http://127.0.0.1:{api.port}"
    async with SdkLikeClient(url, OURS) as ours, SdkLikeClient(url, READ) as reader:
        mine = await ours.create()
        assert mine["owner"] == "ours"
        assert (await ours.status_of("GET", f"/sandboxes/{theirs}"))[0] == 404
        await ours.request("DELETE", f"/sandboxes/{theirs}")
        assert (await client.status_of("GET", f"/sandboxes/{theirs}"))[0] == 200
        assert (await ours.status_of("POST", "/sandboxes", json={"image": "x", "owner": "other"}))[0] == 403
        assert (await reader.status_of("GET", f"/sandboxes/{mine['sandbox_id']}"))[0] == 200
        path = f"/sandboxes/{mine['sandbox_id']}/exec"
        assert (await reader.status_of("POST", path, json={"command": "true"}))[0] == 403


async def test_an_id_belongs_to_one_request(client: SdkLikeClient) -> None:
    wanted = {"image": "x", "sandbox_id": "mine-1", "labels": {"a": "b"}}
    first, second = [await client.request("POST", "/sandboxes", json=wanted) for _ in range(2)]
    assert first == second
    status, body = await client.status_of("POST", "/sandboxes", json={**wanted, "labels": {}})
    assert (status, body["detail"]) == (409, "sandbox_id = 'mine-1' is in use: choose another")


async def test_a_lease_without_heartbeats_and_a_time_that_is_over_end_a_sandbox(client: SdkLikeClient) -> None:
    leased = (await client.create(lease_seconds=0.6))["sandbox_id"]
    timed = (await client.create(ttl_seconds=1.0))["sandbox_id"]
    kept = (await client.create(lease_seconds=60))["sandbox_id"]
    await client.request("POST", f"/sandboxes/{kept}/heartbeat")
    await until_gone(client, leased)
    await until_gone(client, timed)
    assert (await client.exec(kept, "echo kept"))["stdout"] == "kept\n"


async def test_when_there_is_no_room_the_answer_says_when_to_come_back(start_api: Any) -> None:
    small = await start_api(sandbox_api_boxes=1)
    async with SdkLikeClient(f"http://127.0.0.1:{small.port}", pause_s=0.01) as client:
        made = await client.create()
        async with client.session.post(f"{client.base_url}/sandboxes", json={"image": "x"}) as reply:
            assert (reply.status, reply.headers["Retry-After"]) == (503, "5")
        await client.request("DELETE", f"/sandboxes/{made['sandbox_id']}")
        await client.create()


async def test_a_warm_sandbox_is_ready_at_once(start_api: Any) -> None:
    warm = await start_api(sandbox_api_warm=1)
    async with SdkLikeClient(f"http://127.0.0.1:{warm.port}") as client:
        async with asyncio.timeout(60):
            while warm.spare < 1:
                await asyncio.sleep(0.05)
        created = await client.request("POST", "/sandboxes", json={"image": "anything:latest"})
        sandbox = await client.request("GET", f"/sandboxes/{created['sandbox_id']}")
        assert sandbox["ready"]
        assert (await client.exec(created["sandbox_id"], "echo warm"))["stdout"] == "warm\n"


async def test_networks_by_name_and_by_the_flag(client: SdkLikeClient) -> None:
    assert (await client.create())["network"] == "proxy-only"
    assert (await client.create(block_network=False))["network"] == "open"
    listed = await client.create(network={"mode": "allowlist", "hosts": ["example.org"]})
    assert listed["network"] == "allowlist"
    assert "3128" in (await client.exec(listed["sandbox_id"], "echo $HTTPS_PROXY"))["stdout"]


async def test_a_snapshot_is_a_tar_of_what_was_asked_for(client: SdkLikeClient) -> None:
    sandbox = (await client.create())["sandbox_id"]
    await client.exec(sandbox, "mkdir a b; echo 1 > a/x; echo 2 > b/y")
    url = f"{client.base_url}/sandboxes/{sandbox}/snapshot"
    async with client.session.get(url, params={"path": "/workspace/a"}) as reply:
        tar = await reply.read()
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        assert archive.getnames() == ["workspace/a", "workspace/a/x"]
    async with client.session.get(url, params={"path": "/workspace/a"}) as again:
        assert await again.read() == tar


@pytest.mark.parametrize(
    ("method", "path", "options", "status"),
    [
        ("POST", "/sandboxes", {"json": {}}, 422),
        ("POST", "/sandboxes", {"json": {"image": "x", "memory": "lots"}}, 400),
        ("POST", "/sandboxes", {"json": {"image": "x", "sandbox_id": "../x"}}, 422),
        ("POST", "/sandboxes", {"json": {"image": "x", "network": {"mode": "allowlist", "hosts": ["a b"]}}}, 400),
        ("GET", "/sandboxes/unknown", {}, 404),
        ("POST", "/sandboxes/unknown/heartbeat", {}, 404),
        ("POST", "/sandboxes/unknown/exec", {"json": {"command": "true"}}, 404),
        ("GET", "/sandboxes/BOX/files?path=/absent", {}, 404),
        ("GET", "/sandboxes/BOX/files?path=/workspace", {}, 400),
        ("GET", "/sandboxes/BOX/files?path=../etc/passwd", {}, 400),
        ("GET", "/sandboxes/BOX/files?path=/dev/zero", {}, 400),
        ("GET", "/sandboxes/BOX/files/list?path=/etc/passwd", {}, 400),
        ("POST", "/sandboxes/BOX/files", {"json": {"path": "/workspace/x", "content": "no base64!"}}, 400),
        ("POST", "/sandboxes/BOX/files", {"json": {"path": "/etc/passwd", "content": ""}}, 400),
        ("POST", "/sandboxes/BOX/files", {"json": {"path": "/workspace/a\0b", "content": ""}}, 400),
        ("POST", "/sandboxes/BOX/exec", {"json": {"command": "a\0b", "wait": True}}, 200),
        ("POST", "/sandboxes/BOX/exec", {"json": {"command": [], "wait": True}}, 200),
        ("PUT", "/sandboxes/BOX", {}, 405),
        ("GET", "/nowhere", {}, 404),
    ],
)
async def test_what_cannot_be_meant_has_a_code_and_a_reason(
    client: SdkLikeClient, shared_box: str, method: str, path: str, options: dict[str, Any], status: int
) -> None:
    told, body = await client.status_of(method, path.replace("BOX", shared_box), **options)
    assert told == status, body
    assert "detail" in body or status == 200


async def test_a_file_that_is_too_large_is_refused_as_such(client: SdkLikeClient, shared_box: str) -> None:
    await client.exec(shared_box, "truncate -s 1T sparse")
    path = f"/sandboxes/{shared_box}/files?path=sparse"
    assert (await client.status_of("GET", path))[0] == 413
    await client.exec(shared_box, "head -c 99999999 /dev/zero > full")
    more = {"path": "/workspace/more", "content": base64.b64encode(bytes(1 << 16)).decode()}
    status, body = await client.status_of("POST", f"/sandboxes/{shared_box}/files", json=more)
    assert (status, "No space left" in body["detail"]) == (400, True)
    await client.exec(shared_box, "rm full more")


async def test_resources_add_up(client: SdkLikeClient, shared_box: str) -> None:
    told = await client.request("GET", "/resources")
    assert told["status"] == "ok"
    assert any(pod["name"] == f"sandbox-{shared_box}" for pod in told["sandbox_pods"])
    assert told["total_requested"]["memory_bytes"] == sum(pod["memory_request_bytes"] for pod in told["sandbox_pods"])


async def test_nothing_runs_once_the_api_is_closed(start_api: Any) -> None:
    short = await start_api()
    async with SdkLikeClient(f"http://127.0.0.1:{short.port}") as client:
        sandbox = (await client.create())["sandbox_id"]
        await client.request("POST", f"/sandboxes/{sandbox}/exec", json={"command": "setsid sleep 9494"})
        async with asyncio.timeout(30):
            while not running("sleep\0009494"):
                await asyncio.sleep(0.05)
    await short.close()
    assert running("sleep\0009494") == 0
