"""What Orchard's SDK does, in its order, works; and what it counts on holds."""

import asyncio
import base64
import time

import aiohttp
import pytest
from process_watch import running
from sandbox_clients import KEY, ReplyDropper, SdkLikeClient

from openforge.sandbox_manager.api.serve import Api

pytestmark = pytest.mark.asyncio(loop_scope="module")

CREATED = {"sandbox_id": str, "namespace": str, "image": str, "block_network": bool, "cpu": str, "memory": str,
           "timeout": int, "status": str}  # fmt: skip
SANDBOX = {**CREATED, "pod_name": str, "created_at": float, "ready": bool, "status_message": str}
JOB = {"job_id": str, "sandbox_id": str, "command": str, "status": str, "stdout": str, "stderr": str,
       "exit_code": int, "created_at": float, "started_at": float, "completed_at": float}  # fmt: skip
PATCH = """--- a/greeting
+++ b/greeting
@@ -1 +1 @@
-hello
+goodbye
"""


def has(body: dict[str, object], fields: dict[str, type]) -> None:
    assert {name: type(body[name]) for name in fields} == fields


async def test_everything_the_sdk_does_in_the_order_that_it_does_it(client: SdkLikeClient) -> None:
    created = await client.request("POST", "/sandboxes", json={"image": "ubuntu:22.04", "block_network": True})
    has(created, CREATED)
    assert (created["status"], created["cpu"], created["memory"], created["timeout"]) == ("pending", "4", "16Gi", 3600)
    sandbox = created["sandbox_id"]
    waited = await client.request("GET", f"/sandboxes/{sandbox}/wait", params={"timeout": 3600})
    has(waited, {name: kind for name, kind in SANDBOX.items() if name != "timeout"})
    assert (waited["ready"], waited["status"]) == (True, "ready")
    assert await client.request("GET", f"/sandboxes/{sandbox}") == waited
    job = await client.exec(sandbox, "echo out; echo err >&2; exit 3")
    has(job, JOB)
    assert (job["stdout"], job["stderr"], job["exit_code"], job["status"]) == ("out\n", "err\n", 3, "failed")
    assert "error" in job
    content = base64.b64encode(b"hello\n").decode()
    put = await client.request(
        "POST", f"/sandboxes/{sandbox}/files", json={"path": "/workspace/greeting", "content": content}
    )
    assert put == {"success": True, "path": "/workspace/greeting", "size": 6}
    got = await client.request("GET", f"/sandboxes/{sandbox}/files", params={"path": "/workspace/greeting"})
    assert got == {"path": "/workspace/greeting", "content": content, "size": 6}
    await client.exec(sandbox, "mkdir folder; ln -s /nowhere dangling")
    listed = await client.request("GET", f"/sandboxes/{sandbox}/files/list", params={"path": "/workspace"})
    kinds = [(file["name"], file["type"], len(file["modified"])) for file in listed["files"]]
    assert kinds == [("dangling", "file", 19), ("folder", "directory", 19), ("greeting", "file", 19)]
    assert (await client.request("GET", f"/sandboxes/{sandbox}/files/list", params={"path": "/"}))["files"]
    patched = await client.request(
        "POST", f"/sandboxes/{sandbox}/apply_patch", json={"patch": PATCH, "timeout_seconds": 30}
    )
    assert (patched["success"], patched["exit_code"]) == (True, 0), patched
    assert (await client.exec(sandbox, "cat greeting"))["stdout"] == "goodbye\n"
    bad = await client.request("POST", f"/sandboxes/{sandbox}/apply_patch", json={"patch": "no patch; touch /tmp/x"})
    assert (bad["success"], bad["exit_code"]) == (False, 128)
    beat = await client.request("POST", f"/sandboxes/{sandbox}/heartbeat")
    assert beat == {"status": "ok", "sandbox_id": sandbox}
    terminal = await client.terminal(sandbox, ["/bin/sh"])
    assert (await terminal.until("ready"))["pid"] > 1
    await terminal.type(b"echo $((6*7))\nexit 5\n")
    await terminal.until("stdout", b"42")
    assert (await terminal.until("exit"))["code"] == 5
    for _ in range(2):
        gone = await client.request("DELETE", f"/sandboxes/{sandbox}")
        assert gone == {"status": "deleted", "sandbox_id": sandbox}
    assert (await client.status_of("GET", f"/sandboxes/{sandbox}"))[0] == 404


async def test_the_public_routes_need_no_key_and_all_others_do(api: Api) -> None:
    async with SdkLikeClient(f"http://127.0.0.1:{api.port}", "") as nobody:
        assert (await nobody.request("GET", "/"))["status"] == "running"
        assert await nobody.request("GET", "/health") == {"status": "healthy"}
        assert (await nobody.status_of("GET", "/resources"))[0] == 401
    async with SdkLikeClient(f"http://127.0.0.1:{api.port}", "wrong") as stranger:
        status, body = await stranger.status_of("GET", "/sandboxes/x")
        assert (status, body) == (403, {"detail": "Invalid API key"})


async def test_commands_mean_what_they_mean_to_orchard(client: SdkLikeClient) -> None:
    sandbox = (await client.create())["sandbox_id"]
    run = client.exec
    assert (await run(sandbox, ["echo", "$((1+1))", "a;echo", "b"]))["stdout"] == "2 a\nb\n"
    assert (await run(sandbox, "pwd"))["stdout"] == "/workspace\n"
    assert (await run(sandbox, "pwd", cwd="/nowhere"))["stdout"] == "/\n"
    assert (await run(sandbox, "pwd", cwd="/tmp"))["stdout"] == "/tmp\n"
    assert (await run(sandbox, "echo $COLOUR", env={"COLOUR": "blue"}))["stdout"] == "blue\n"
    assert (await run(sandbox, "kill -9 $$"))["exit_code"] == -9
    assert (await run(sandbox, "printf '\\377'"))["stdout"] == "\ufffd"
    login = await run(sandbox, "echo 'export FROM_RC=yes' > ~/.bashrc; exec bash -c 'true'")
    assert login["status"] == "succeeded"
    login = await run(sandbox, "echo $FROM_RC; shopt login_shell", login_shell=True)
    assert (login["stdout"].split(), login["stderr"]) == (["yes", "login_shell", "on"], "")
    flood = await run(sandbox, "head -c 9000000 /dev/zero | tr '\\0' x")
    assert (flood["truncated"], len(flood["stdout"])) == (True, 4 << 20)


async def test_a_time_out_ends_the_command_and_never_the_sandbox(client: SdkLikeClient) -> None:
    sandbox = (await client.create())["sandbox_id"]
    await client.exec(sandbox, "(setsid sleep 3131 >/dev/null 2>&1 &)")
    late = await client.exec(sandbox, "echo partial; (setsid sleep 3232 &); sleep 3232", timeout_seconds=1)
    assert (late["exit_code"], late["status"], late["stdout"]) == (124, "failed", "partial\n")
    assert late["error"] == "Command timed out after 1s"
    assert (running("sleep\0003131"), running("sleep\0003232")) == (1, 0)
    assert (await client.exec(sandbox, "echo alive"))["stdout"] == "alive\n"


async def test_a_command_whose_answer_gets_lost_three_times_is_started_once(api: Api, client: SdkLikeClient) -> None:
    sandbox = (await client.create())["sandbox_id"]
    dropper = ReplyDropper(api.port, drops=3)
    await dropper.start()
    async with SdkLikeClient(dropper.url) as unlucky:
        job = await unlucky.exec(sandbox, "echo started >> starts; echo done")
    assert job["stdout"] == "done\n"
    assert dropper.drops == 0
    assert (await client.exec(sandbox, "cat starts"))["stdout"] == "started\n"
    dropper.stop()


async def test_a_client_that_leaves_a_running_command_finds_it_again(api: Api, client: SdkLikeClient) -> None:
    sandbox = (await client.create())["sandbox_id"]
    body = {"command": "echo started >> starts; sleep 1; cat starts", "wait": True}
    url = f"http://127.0.0.1:{api.port}/sandboxes/{sandbox}/exec"
    async with aiohttp.ClientSession(headers={"X-API-Key": KEY}) as impatient:
        with pytest.raises(asyncio.TimeoutError):
            await impatient.post(url, json=body, timeout=aiohttp.ClientTimeout(total=0.5))
    assert (await client.request("POST", f"/sandboxes/{sandbox}/exec", json=body))["stdout"] == "started\n"


async def test_the_same_command_again_is_a_new_one_once_the_answer_arrived(client: SdkLikeClient) -> None:
    sandbox = (await client.create())["sandbox_id"]
    for count in (1, 2, 3):
        assert (await client.exec(sandbox, "echo x >> x; wc -l < x"))["stdout"].strip() == str(count)
    at_once = await asyncio.gather(*(client.exec(sandbox, "sleep 0.2; echo $$") for _ in range(4)))
    assert len({job["job_id"] for job in at_once}) == 4


async def test_an_idempotency_key_decides_for_every_client(api: Api, client: SdkLikeClient) -> None:
    sandbox = (await client.create())["sandbox_id"]
    body = {"command": "echo x >> x; wc -l < x", "wait": True}
    path = f"/sandboxes/{sandbox}/exec"
    jobs = [await client.request("POST", path, json=body, headers={"Idempotency-Key": "a"}) for _ in range(3)]
    assert {job["stdout"].strip() for job in jobs} == {"1"}
    other = await client.request("POST", path, json=body, headers={"Idempotency-Key": "b"})
    assert other["stdout"].strip() == "2"
    changed = {**body, "command": "true"}
    assert (await client.status_of("POST", path, json=changed, headers={"Idempotency-Key": "a"}))[0] == 409
    wanted = {"image": "any", "labels": {"of": "idempotency"}}
    made = [await client.request("POST", "/sandboxes", json=wanted, headers={"Idempotency-Key": "c"}) for _ in range(2)]
    assert made[0]["sandbox_id"] == made[1]["sandbox_id"]


async def test_one_shot_clients_are_never_taken_for_retries(api: Api, client: SdkLikeClient) -> None:
    sandbox = (await client.create())["sandbox_id"]
    url = f"http://127.0.0.1:{api.port}/sandboxes/{sandbox}/exec"
    said = []
    for _ in range(2):
        headers = {"X-API-Key": KEY, "User-Agent": "curl/8.0"}
        async with aiohttp.ClientSession(headers=headers) as once:
            reply = await once.post(url, json={"command": "echo x >> x; wc -l < x", "wait": True})
            said.append((await reply.json())["stdout"].strip())
    assert said == ["1", "2"]


async def test_a_job_without_wait_is_polled_and_waited_for(client: SdkLikeClient) -> None:
    sandbox = (await client.create())["sandbox_id"]
    queued = await client.request("POST", f"/sandboxes/{sandbox}/exec", json={"command": "sleep 0.5; echo late"})
    assert queued == {"job_id": queued["job_id"], "status": "queued"}
    early = await client.request("GET", f"/jobs/{queued['job_id']}/wait", params={"timeout": 0})
    assert early["status"] in ("queued", "running")
    done = await client.request("GET", f"/jobs/{queued['job_id']}/wait", params={"timeout": 30})
    assert (done["status"], done["stdout"], done["exit_code"]) == ("succeeded", "late\n", 0)
    assert (await client.status_of("GET", "/jobs/unknown"))[0] == 404


# Terminals.


async def test_a_client_that_leaves_its_terminal_takes_the_program_with_it(client: SdkLikeClient) -> None:
    sandbox = (await client.create())["sandbox_id"]
    terminal = await client.terminal(sandbox, ["/bin/sh", "-c", "(setsid sleep 8484 &); echo up; sleep 8484"])
    await terminal.until("stdout", b"up")
    await terminal.socket.close()
    deadline = time.monotonic() + 20
    while running("sleep\0008484"):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


async def test_a_terminal_hears_signals_and_sizes(client: SdkLikeClient) -> None:
    sandbox = (await client.create())["sandbox_id"]
    terminal = await client.terminal(
        sandbox, ["/bin/sh", "-c", "stty size; read x; stty size; sleep 60"], rows=30, cols=99
    )
    await terminal.until("stdout", b"30 99")
    await terminal.say(type="resize", rows=31, cols=98)
    await terminal.say(type="nonsense", what=1)
    await terminal.type(b"\n")
    await terminal.until("stdout", b"31 98")
    await terminal.say(type="signal", sig="KILL")
    assert (await terminal.until("exit"))["code"] == -9


async def test_a_terminal_without_a_program_says_error_and_one_that_is_missing_exits_127(client: SdkLikeClient) -> None:
    sandbox = (await client.create())["sandbox_id"]
    assert "cmd" in (await (await client.terminal(sandbox, [])).until("error"))["message"]
    missing = await client.terminal(sandbox, ["no-such-program"])
    assert (await missing.until("exit"))["code"] == 127
    assert [frame["type"] for frame in missing.frames] == ["ready", "stdout", "exit"]


async def test_a_terminal_is_refused_before_it_opens_and_takes_its_key_from_either_place(
    api: Api, client: SdkLikeClient
) -> None:
    sandbox = (await client.create())["sandbox_id"]
    base = f"ws://127.0.0.1:{api.port}/sandboxes"
    async with aiohttp.ClientSession() as bare:
        for url, status in (
            (f"{base}/{sandbox}/exec/pty", 401),
            (f"{base}/{sandbox}/exec/pty?api_key=wrong", 403),
            (f"{base}/unknown/exec/pty?api_key={KEY}", 404),
        ):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await bare.ws_connect(url)
            assert refused.value.status == status
        opened = await bare.ws_connect(f"{base}/{sandbox}/exec/pty", protocols=[f"api_key.{KEY}"])
        await opened.send_str('{"type": "init", "cmd": ["true"]}')
        assert "ready" in (await opened.receive()).data
        await opened.close()
