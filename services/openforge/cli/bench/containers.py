"""What a sandbox of driver `docker` costs beside a bare `docker run` of the same image.

`docker_ratio` is the median time from the wish to the end of the first command, over the median time of
`docker run --rm --network none IMAGE true`, taken in turns. It is null, with `docker_why`, where no daemon
answers or no image is named.
"""

import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from openforge.sandbox.contract import Box, CannotIsolate, SandboxDriver, SandboxLimits, SandboxSpec
from openforge.sandbox.docker import DockerDriver
from openforge.sandbox.docker.engine import find_socket

_LIMITS = SandboxLimits(memory_mb=192, pids=64, disk_mb=16)


async def docker_ratio(rounds: int) -> dict[str, Any]:
    """With the daemon of OPENFORGE_SANDBOX_SOCKET (or the usual one) and the image of OPENFORGE_SANDBOX_IMAGE."""
    image = os.environ.get("OPENFORGE_SANDBOX_IMAGE", "")
    if not image:
        return {"docker_ratio": None, "docker_why": "OPENFORGE_SANDBOX_IMAGE names no image"}
    socket = Path(os.environ.get("OPENFORGE_SANDBOX_SOCKET") or find_socket())
    with tempfile.TemporaryDirectory(prefix="openforge-bench-") as folder:
        driver = DockerDriver(Path(folder), socket=socket, image=image, pull=False)
        try:
            await driver.start()
            return await _measured(driver, socket, image, rounds)
        except (CannotIsolate, FileNotFoundError) as error:
            return {"docker_ratio": None, "docker_why": str(error)}
        finally:
            await driver.close()


async def _measured(driver: SandboxDriver, socket: Path, image: str, rounds: int) -> dict[str, Any]:
    await (await _first_command(driver)).stop()  # the first one pays for what all share
    ours, bare = [], []
    for _ in range(rounds):
        began = time.monotonic()
        box = await _first_command(driver)
        ours.append(time.monotonic() - began)
        await box.stop()
        began = time.monotonic()
        await _bare_run(socket, image)
        bare.append(time.monotonic() - began)
    start, run = statistics.median(ours), statistics.median(bare)
    return {
        "docker_ratio": round(start / run, 3),
        "docker_start_ms_p50": round(start * 1000, 1),
        "docker_run_ms_p50": round(run * 1000, 1),
    }


async def _first_command(driver: SandboxDriver) -> Box:
    box = await driver.create(SandboxSpec(name="bench", limits=_LIMITS))
    await box.exec(["true"], timeout_s=60)
    return box


async def _bare_run(socket: Path, image: str) -> None:
    line = ("docker", "-H", f"unix://{socket}", "run", "--rm", "--network", "none", image, "true")
    process = await asyncio.create_subprocess_exec(*line, stdout=asyncio.subprocess.DEVNULL)
    if await process.wait():
        raise RuntimeError(f"{' '.join(line)} ended with {process.returncode}")
