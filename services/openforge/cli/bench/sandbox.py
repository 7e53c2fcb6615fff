"""`openforge bench sandbox`: what a sandbox costs, in time and in CPU, from the driver and over the API.

`start_ms_p50` is from the wish to the end of the first command, cold; `warm_start_ms_p50` the same from a pool;
`start_200_s` until 200 wished for at once all live; `api_exec_ms_p50` one command over HTTP on this machine;
`docker_ratio` as in `openforge.cli.bench.containers`.

CPU is that of this process, its launcher and everything in the sandboxes, read from the kernel's accounts
before anything is stopped; what the kernel does afterwards on its own account is not in it.
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx

from openforge.cli.bench.containers import docker_ratio
from openforge.sandbox.admission import Admission
from openforge.sandbox.contract import Box, Sandbox, SandboxDriver, SandboxLimits, SandboxSpec
from openforge.sandbox.pool import Pool
from openforge.sandbox.process import ProcessDriver
from openforge.sandbox_manager.api.serve import Api
from openforge.sandbox_manager.api.settings import ApiSettings

T = TypeVar("T")
SPEC = SandboxSpec(name="bench", limits=SandboxLimits(memory_mb=192, pids=64, disk_mb=16))


async def measure(*, rounds: int = 30, many: int = 200, at_once: int = 4) -> dict[str, Any]:
    """`rounds` sandboxes one after the other, then `many`, `at_once` being made at a time and all alive together."""
    with tempfile.TemporaryDirectory(prefix="openforge-bench-") as folder:
        driver = ProcessDriver(Path(folder), allow_reduced=True)
        try:
            await (await driver.create(SPEC)).stop()  # the first one pays for what all share
            starts = {
                "start_ms_p50": await _starts(driver.create, rounds),
                "warm_start_ms_p50": await _warm_starts(driver, rounds),
            }
            one_by_one = await _one_by_one(driver, rounds)
            together = await _together(driver, many, at_once)
            api = {"api_exec_ms_p50": await _over_http(driver, rounds)}
            containers = await docker_ratio(rounds)
            return {"isolation": driver.isolation, **starts, **one_by_one, **together, **api, **containers}
        finally:
            await driver.close()


async def _starts(create: Callable[[SandboxSpec], Awaitable[Box]], rounds: int) -> float:
    """From the wish to the end of the first command, one after the other, milliseconds."""
    times: list[float] = []
    for _ in range(rounds):
        boxes: list[Box] = []

        async def first_command(boxes: list[Box] = boxes) -> None:
            boxes.append(await create(SPEC))
            await boxes[0].exec("true", timeout_s=10)

        await _timed(times, first_command)
        await boxes[0].stop()
    return round(statistics.median(times), 2)


async def _warm_starts(driver: SandboxDriver, rounds: int) -> float:
    """As many are ready as are asked for, so that filling up again is not in it."""
    pool = Pool(driver, Admission(at_once=4, waiting=rounds))
    pool.keep(SPEC, rounds)
    while pool.spare < rounds:
        await asyncio.sleep(0.01)
    pool.keep(SPEC, 0)
    warm = await _starts(pool.create, rounds)
    await pool.drain()
    return warm


async def _over_http(driver: SandboxDriver, rounds: int) -> float:
    settings = ApiSettings(sandbox_api_keys=("bench-key",), sandbox_api_memory_mb=192, sandbox_api_disk_mb=16)
    api = Api(settings, driver, labels={})
    await api.start()
    times: list[float] = []
    base = f"http://127.0.0.1:{api.port}/sandboxes"
    try:
        async with httpx.AsyncClient(headers={"X-API-Key": "bench-key"}, timeout=60) as client:
            sandbox = (await client.post(base, json={"image": "bench"})).json()["sandbox_id"]
            (await client.get(f"{base}/{sandbox}/wait")).raise_for_status()
            for _ in range(rounds):
                body = {"command": "true", "wait": True}
                reply = await _timed(times, lambda: client.post(f"{base}/{sandbox}/exec", json=body))  # noqa: B023
                reply.raise_for_status()
    finally:
        await api.close()
    return round(statistics.median(times), 2)


async def _one_by_one(driver: SandboxDriver, rounds: int) -> dict[str, float]:
    steps: dict[str, list[float]] = {"create": [], "exec": [], "put": [], "get_tar": [], "stop": []}
    busy_before = _cpu_s()
    boxes = []
    for _ in range(rounds):
        boxes.append(await _timed(steps["create"], lambda: driver.create(SPEC)))
        await _use(boxes[-1], steps)
    cpu_ms = (_cpu_s() - busy_before) / rounds * 1000  # before the stops: who is killed is in nobody's accounts
    for box in boxes:
        await _timed(steps["stop"], box.stop)
    medians = {f"{name}_ms_p50": round(statistics.median(times), 2) for name, times in steps.items()}
    return {**medians, "cpu_ms_per_sandbox_with_4_calls": round(cpu_ms, 1)}


async def _use(box: Sandbox, steps: dict[str, list[float]]) -> None:
    await _timed(steps["put"], lambda: box.put("/workspace/file", b"content"))
    for _ in range(2):
        await _timed(steps["exec"], lambda: box.exec("cat file", timeout_s=10))
    await _timed(steps["get_tar"], lambda: box.get_tar(["/workspace"]))


async def _together(driver: SandboxDriver, many: int, at_once: int) -> dict[str, float]:
    limit = asyncio.Semaphore(at_once)

    async def make() -> Sandbox:
        async with limit:
            return await driver.create(SPEC)

    busy_before, began = _cpu_s(), time.monotonic()
    boxes = await asyncio.gather(*(make() for _ in range(many)))
    up_s, cpu_s = time.monotonic() - began, _cpu_s() - busy_before
    began = time.monotonic()
    await asyncio.gather(*(box.stop() for box in boxes))
    return {
        f"start_{many}_s": round(up_s, 2),
        f"stop_{many}_s": round(time.monotonic() - began, 2),
        "cpu_ms_per_create": round(cpu_s / many * 1000, 1),
    }


async def _timed(times: list[float], work: Callable[[], Awaitable[T]]) -> T:
    began = time.monotonic()
    result = await work()
    times.append((time.monotonic() - began) * 1000)
    return result


def _cpu_s() -> float:
    """CPU seconds of this process and of all below it, living or reaped."""
    table = {pid: stat for pid in os.listdir("/proc") if pid.isdigit() and (stat := _stat(pid))}
    mine = {str(os.getpid())}
    grown = True
    while grown:
        more = {pid for pid, stat in table.items() if stat[1] in mine} - mine
        mine |= more
        grown = bool(more)
    ticks = sum(int(field) for pid in mine if pid in table for field in table[pid][11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def _stat(pid: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def main() -> None:
    json.dump(asyncio.run(measure()), sys.stdout)
    print()


if __name__ == "__main__":
    main()
