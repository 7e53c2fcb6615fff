"""What holds of sandboxes that are containers, beyond the contract: on a real dockerd and a real podman."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from container_daemons import Daemons
from sandbox_drivers import CASES, Case

from openforge.sandbox.contract import Box, CannotIsolate, ExecResult, SandboxDriver, SandboxLost
from openforge.sandbox.docker import DockerDriver

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.containers]


@pytest.fixture(scope="module", params=[case for case in CASES if case.daemon], ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    made: Case = request.param
    return made


@pytest.fixture(scope="module")
def socket(case: Case, daemons: Daemons) -> Path:
    return daemons.socket(case.daemon)


async def sh(box: Box, command: str, timeout_s: float = 60.0) -> ExecResult:
    return await box.exec(command, timeout_s=timeout_s)


async def asked(socket: Path, path: str, **params: str) -> Any:
    transport = httpx.AsyncHTTPTransport(uds=str(socket))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=60) as client:
        return (await client.get(path, params=params)).json()


async def containers_of(socket: Path, label: str) -> list[Any]:
    return list(await asked(socket, "/containers/json", all="true", filters=json.dumps({"label": [label]})) or [])


async def test_commands_have_no_rights_and_no_way_to_more(box: Box) -> None:
    status = (await sh(box, "cat /proc/self/status")).stdout.decode()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == ["1000"] * 4
    assert fields["CapEff"] == fields["CapPrm"] == fields["CapBnd"] == "0" * 16
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    assert int(fields["Seccomp_filters"]) >= 2  # the daemon's and ours
    assert (await sh(box, "unshare -U true")).exit_code != 0
    assert (await sh(box, "mount -t tmpfs none /workspace")).exit_code != 0
    assert (await sh(box, "cat /proc/1/environ /proc/1/fd/*")).stdout == b""


async def test_there_is_no_network_but_its_own_loopback(box: Box) -> None:
    assert [
        line.split(b":")[0].strip() for line in (await sh(box, "tail -n +3 /proc/net/dev")).stdout.splitlines()
    ] == [b"lo"]
    assert len((await sh(box, "cat /proc/net/route")).stdout.splitlines()) == 1


async def test_every_place_that_can_be_written_has_a_size(box: Box) -> None:
    writable = "find / -xdev -type d -writable 2>/dev/null; for place in $(cut -d' ' -f2 /proc/mounts | sort -u); do"
    writable += " [ -w $place ] && [ -d $place ] && echo $place; done; true"
    places = set((await sh(box, writable)).stdout.decode().split())
    sized = {}
    for place in places:
        if place.startswith("/proc"):
            continue
        blocks, size = (await sh(box, f"stat -f -c '%b %S' {place}")).stdout.split()
        sized[place] = int(blocks) * int(size)
    assert {"/workspace", "/tests", "/tmp", "/dev/shm"} <= sized.keys()
    assert max(sized.values()) <= 32 << 20, sized


async def test_a_full_folder_is_the_commands_error_and_costs_no_more(box: Box) -> None:
    result = await sh(box, "head -c 30000000 /dev/zero > big; stat -c %s big")
    assert b"No space left" in result.stderr
    assert int(result.stdout) <= 16 << 20


async def test_memory_that_runs_out_ends_the_command_and_not_the_sandbox(box: Box) -> None:
    result = await sh(box, "head -c 400000000 /dev/zero | tail -c 399999999 | wc -c; exit ${PIPESTATUS:-0}")
    assert result.out_of_memory
    assert (await sh(box, "echo alive")).stdout == b"alive\n"


async def test_processes_are_limited(box: Box) -> None:
    result = await sh(box, "for i in $(seq 200); do sleep 30 & done; wait", timeout_s=5)
    assert b"fork" in result.stderr.lower() or b"resource" in result.stderr.lower(), result
    await box.kill_all()
    assert (await sh(box, "echo alive")).stdout == b"alive\n"


async def test_what_a_daemon_tells_of_a_container_holds_no_environment(
    driver: SandboxDriver, case: Case, socket: Path
) -> None:
    box = await driver.create(case.spec("secret", env={"API_KEY": "swordfish-1"}))
    await box.exec("true", timeout_s=30, env={"OTHER": "swordfish-2"})
    assert (await sh(box, "echo $API_KEY")).stdout == b"swordfish-1\n"
    assert "swordfish" not in json.dumps(await asked(socket, f"/containers/{box.id}/json"))
    await box.stop()


async def test_an_image_that_is_not_there_is_said_so_at_once(driver: SandboxDriver, case: Case) -> None:
    began = time.monotonic()
    with pytest.raises(SandboxLost, match="no-such-image"):
        await driver.create(case.spec("none", image="no-such-image:1"))
    assert time.monotonic() - began < 30
    with pytest.raises(ValueError, match="OPENFORGE_SANDBOX_IMAGE"):
        await driver.create(case.spec("none", image=""))


async def test_a_container_that_dies_is_a_lost_sandbox(driver: SandboxDriver, case: Case, socket: Path) -> None:
    box = await driver.create(case.spec("dies"))
    running = asyncio.create_task(sh(box, "sleep 60"))
    await asyncio.sleep(0.3)
    transport = httpx.AsyncHTTPTransport(uds=str(socket))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=60) as client:
        await client.post(f"/containers/{box.id}/kill")  # Podman may answer 500 though it did kill
    with pytest.raises(SandboxLost):
        await running
    assert not box.alive
    await box.stop()


async def test_a_daemon_that_is_not_there_and_a_runtime_it_does_not_have_are_said_so(
    socket: Path, tmp_path: Path
) -> None:
    absent = DockerDriver(tmp_path / "a", socket=tmp_path / "absent.sock")
    with pytest.raises(CannotIsolate, match=r"absent\.sock"):
        await absent.start()
    await absent.close()
    strange = DockerDriver(tmp_path / "b", socket=socket, runtime="no-such-runtime")
    with pytest.raises(CannotIsolate, match=r"runtime = 'no-such-runtime' is not known to .*: it has .*runc"):
        await strange.start()
    await strange.close()


OWNER = """
import asyncio, sys
from pathlib import Path
from openforge.sandbox.contract import SandboxSpec
from openforge.sandbox.docker import DockerDriver

async def main():
    driver = await DockerDriver(Path(sys.argv[1]), socket=Path(sys.argv[2]), image=sys.argv[3], pull=False).start()
    boxes = [await driver.create(SandboxSpec(name=f"doomed-{n}", labels={"run": "r"})) for n in range(2)]
    for box in boxes:
        await box.exec("(setsid sleep 7654 >/dev/null 2>&1 &)", timeout_s=30)
    print("ready", flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


async def test_a_killed_owner_takes_its_containers_with_it_and_the_next_one_clears_the_rest(
    case: Case, socket: Path, tmp_path: Path
) -> None:
    survivor = await DockerDriver(tmp_path, socket=socket, image=case.image, pull=False).start()
    mine = await survivor.create(case.spec("mine", labels={"run": "r"}))
    owner = await asyncio.to_thread(
        subprocess.Popen,
        [sys.executable, "-c", OWNER, str(tmp_path), str(socket), case.image],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    assert await asyncio.to_thread(owner.stdout.readline) == "ready\n"
    assert len(await containers_of(socket, "openforge.run=r")) == 3
    assert await survivor.reconcile({"run": "r"}) == 0  # nobody is dead yet
    owner.send_signal(signal.SIGKILL)
    await asyncio.to_thread(owner.wait)
    owner.stdout.close()
    assert await survivor.reconcile({"run": "another"}) == 0
    assert await survivor.reconcile({"run": "r"}) == 2
    assert len(await containers_of(socket, "openforge.run=r")) == 1
    assert (await sh(mine, "echo unharmed")).stdout == b"unharmed\n"
    assert len(list(tmp_path.glob("base-*"))) == 1
    await survivor.close()
    assert await containers_of(socket, "openforge.run=r") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["boxes", "id"]
    assert list((tmp_path / "boxes").iterdir()) == []
