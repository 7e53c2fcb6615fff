"""Tries reduced isolation as an ordinary user. A program, since a test process cannot give up root and take it back.

Prints one line for each promise that was kept; raises where one was not.
"""

import asyncio
import sys
from pathlib import Path

from openforge.sandbox.contract import PathRefused, SandboxLimits, SandboxSpec
from openforge.sandbox.process import CannotIsolate, ProcessDriver

LIMITS = SandboxLimits(memory_mb=192, pids=64, disk_mb=16)


async def main(folder: Path) -> None:
    try:
        ProcessDriver(folder / "refused")
    except CannotIsolate as refusal:
        print("refused unless allowed" if "trusted_only" in str(refusal) else refusal)
    driver = ProcessDriver(folder / "state", allow_reduced=True)
    assert driver.isolation == "reduced"
    box = await driver.create(SandboxSpec(name="reduced", limits=LIMITS))
    assert (await box.exec("echo hello; ls /root /home", timeout_s=10)).stdout.startswith(b"hello\n")
    print("commands run")
    await box.exec("(sleep 1111 >/dev/null 2>&1 &)", timeout_s=10)
    late = await box.exec("setsid sh -c 'sleep 2222 & sleep 2222' & sleep 2222", timeout_s=0.5)
    assert (late.exit_code, late.timed_out) == (124, True)
    left = (await box.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", timeout_s=10)).stdout
    assert b"sleep 1111" in left
    assert b"sleep 2222" not in left
    print("a timeout ends the command alone")
    assert (await box.exec("unshare -U true", timeout_s=10)).exit_code != 0
    assert (await box.exec(["/bin/bash", "-c", "echo > /dev/tcp/1.1.1.1/53"], timeout_s=10)).exit_code != 0
    print("no network, no nested user namespace")
    bomb = await box.exec(["/bin/bash", "-c", "b() { b | b & }; b; sleep 30"], timeout_s=1.0)
    assert bomb.timed_out
    await box.kill_all()
    assert (await box.exec("echo alive", timeout_s=10)).stdout == b"alive\n"
    print("a fork bomb ends")
    await box.put("/workspace/a", b"x")
    tar = await box.get_tar(["/workspace"])
    await box.put_tar("/tests", tar)
    assert await box.get("/tests/workspace/a") == b"x"
    try:
        await box.get("/etc/shadow")
    except PathRefused:
        print("files come and go")
    await box.exec("kill -9 -1", timeout_s=10)
    assert (await box.exec("echo alive", timeout_s=10)).stdout == b"alive\n"
    await box.stop()
    await driver.close()
    assert list((folder / "state" / "boxes").iterdir()) == []
    print("nothing left")


asyncio.run(main(Path(sys.argv[1])))
