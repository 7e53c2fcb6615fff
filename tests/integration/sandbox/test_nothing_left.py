"""What remains of sandboxes: nothing, whoever dies."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from leftovers import cgroups_of
from process_watch import pids_of
from sandbox_drivers import SMALL, full_driver

from openforge.sandbox.contract import SandboxLost, SandboxSpec
from openforge.sandbox.process import ProcessDriver
from openforge.sandbox.process.cgroups import Hierarchies, find_hierarchies


def mounts() -> str:
    return Path("/proc/self/mounts").read_text()


def start_owner(state_dir: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", OWNER, str(state_dir)], stdout=subprocess.PIPE, text=True)


async def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_two_hundred_sandboxes_leave_nothing_behind(tmp_path: Path) -> None:
    mounts_before = mounts()
    descriptors_before = len(os.listdir("/proc/self/fd"))
    driver = full_driver(tmp_path / "state")
    limit = asyncio.Semaphore(8)

    async def live(number: int) -> None:
        async with limit:
            box = await driver.create(SandboxSpec(name=f"leaves-nothing-{number}", limits=SMALL))
            assert (await box.exec("echo $$ > file; (sleep 6543 &) ; cat file", timeout_s=20)).exit_code == 0
            await box.stop()

    await asyncio.gather(*(live(number) for number in range(200)))
    assert list((tmp_path / "state" / "boxes").iterdir()) == []
    await driver.close()
    assert cgroups_of("leaves-nothing") == []
    assert pids_of("sleep\x006543") == []
    assert pids_of(str(tmp_path)) == []
    assert mounts() == mounts_before
    assert list((tmp_path / "state").glob("base-*")) == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors_before


OWNER = """
import asyncio, sys
from pathlib import Path
from openforge.sandbox.contract import SandboxLost, SandboxSpec
from openforge.sandbox.process import ProcessDriver

async def main():
    driver = ProcessDriver(Path(sys.argv[1]), owner="doomed")
    boxes = [await driver.create(SandboxSpec(name=f"doomed-{n}", labels={"run": "r"})) for n in range(3)]
    for box in boxes:
        await box.exec("(setsid sleep 5432 >/dev/null 2>&1 &)", timeout_s=10)
    print("ready", flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


async def test_a_killed_owner_takes_its_sandboxes_with_it_and_the_next_one_clears_the_rest(tmp_path: Path) -> None:
    survivor = full_driver(tmp_path / "state")
    mine = await survivor.create(SandboxSpec(name="mine", labels={"run": "r"}))
    owner = start_owner(tmp_path / "state")
    assert owner.stdout is not None
    assert await asyncio.to_thread(owner.stdout.readline) == "ready\n"
    assert len(pids_of("sleep\x005432")) == 3
    assert await survivor.reconcile({"run": "r"}) == 0  # nobody is dead yet
    owner.send_signal(signal.SIGKILL)
    await asyncio.to_thread(owner.wait)
    owner.stdout.close()
    await until(lambda: not pids_of("sleep\x005432"))
    assert cgroups_of("doomed") != []
    assert await survivor.reconcile({"run": "another"}) == 0
    assert await survivor.reconcile({"run": "r"}) == 3
    assert cgroups_of("doomed") == []
    assert len(list((tmp_path / "state").glob("base-*"))) == 1
    assert (await mine.exec("echo unharmed", timeout_s=5)).stdout == b"unharmed\n"
    await survivor.close()


async def test_a_killed_launcher_loses_its_sandboxes_and_the_next_create_works(tmp_path: Path) -> None:
    driver = full_driver(tmp_path / "state")
    box = await driver.create(SandboxSpec(name="first"))
    launcher = [pid for pid in pids_of("process/launcher.py") if parent_of(pid) == os.getpid()]
    os.kill(launcher[0], signal.SIGKILL)
    with pytest.raises(SandboxLost):
        await box.exec("sleep 60", timeout_s=60)
    await box.stop()
    second = await driver.create(SandboxSpec(name="second"))
    assert (await second.exec("echo works", timeout_s=5)).stdout == b"works\n"
    await driver.close()


async def test_the_freezer_alone_can_end_a_sandbox(tmp_path: Path) -> None:
    await full_driver(tmp_path / "probe").close()  # skips where there is nothing to try
    found = find_hierarchies()
    if "freezer" not in found.v1:
        return  # a host of version 2 only
    driver = ProcessDriver(tmp_path / "state", hierarchies=Hierarchies(v1=found.v1))
    box = await driver.create(SandboxSpec(name="v1-only", limits=SMALL))
    late = await box.exec("env -i setsid sh -c 'sleep 4321 & sleep 4321' & sleep 4321", timeout_s=0.5)
    assert late.timed_out
    assert pids_of("sleep\x004321") == []
    await box.exec("(sleep 4321 >/dev/null 2>&1 &)", timeout_s=5)
    await box.stop()
    assert pids_of("sleep\x004321") == []
    await driver.close()
    assert cgroups_of("v1-only") == []


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
