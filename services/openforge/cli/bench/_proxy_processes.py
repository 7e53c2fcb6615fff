"""The processes of `bench proxy`: the stub engine, our proxy as one process or several, and what they use.

Promises: each is up when it is given out, and ended when it is given back.
"""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from openforge.bus.server import free_port
from openforge.service import ends_with_us, read_health


@asynccontextmanager
async def module(name: str, *arguments: str) -> AsyncIterator[int]:
    """The process id of one of this bench's own programs, which says `ready`."""
    command = ("-m", f"openforge.cli.bench.{name}", *arguments)
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.PIPE, preexec_fn=ends_with_us()
    )
    try:
        assert process.stdout is not None
        if await process.stdout.readline() != b"ready\n":
            raise SystemExit(f"openforge: {name} ended at once: its last line says why")
        yield process.pid
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def stub_process(model: Path, chunks: int) -> AsyncIterator[int]:
    """Its port."""
    port = free_port()
    async with module("_proxy_stub", str(port), str(model), str(chunks)):
        yield port


@asynccontextmanager
async def floor_processes(count: int, nats_url: str, engine_port: int) -> AsyncIterator[tuple[int, list[int]]]:
    """Their port and their process ids."""
    port = free_port()
    async with AsyncExitStack() as stack:
        start = [module("_proxy_floor", str(port), nats_url, str(engine_port)) for _ in range(count)]
        yield port, [await stack.enter_async_context(each) for each in start]


@asynccontextmanager
async def proxy_processes(
    count: int, run: str, folder: Path, nats_url: str, engine_port: int, more: Mapping[str, str]
) -> AsyncIterator[tuple[int, list[int]]]:
    """The port that they share, and their process ids. `more` is added to their environment."""
    port = free_port()
    env = {
        **os.environ,
        **more,
        "OPENFORGE_RUN": run,
        "OPENFORGE_NATS_URL": nats_url,
        "OPENFORGE_ENGINE_URL": f"http://127.0.0.1:{engine_port}",
        "OPENFORGE_PROXY_URL": f"http://127.0.0.1:{port}",
        "OPENFORGE_PROXY_REPLICAS": str(count),
    }
    async with AsyncExitStack() as stack:
        start = [_proxy(env, folder / f"{run}-{count}-{number}") for number in range(count)]
        yield port, [await stack.enter_async_context(each) for each in start]


@asynccontextmanager
async def _proxy(env: dict[str, str], name: Path) -> AsyncIterator[int]:
    health, said = name.with_suffix(".json"), name.with_suffix(".log")
    with said.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "openforge.proxy"),
            env=env | {"OPENFORGE_HEALTH_FILE": str(health)},
            stderr=log,
            preexec_fn=ends_with_us(),
        )
    try:
        while not ((state := read_health(health)) and state.ready and state.pid == process.pid):
            if process.returncode is not None:
                raise SystemExit(f"openforge: the proxy ended at once: {said.read_text()[-500:]}")
            await asyncio.sleep(0.05)
        yield process.pid
    finally:
        process.terminate()
        await process.wait()


def cpu_s(pids: Sequence[int]) -> float:
    """CPU seconds that processes have used."""
    return sum(_cpu_s(pid) for pid in pids)


def _cpu_s(pid: int) -> float:
    """All its threads together: by its CPU clock, finer than /proc's ticks."""
    return time.clock_gettime((~pid << 3) | 2)


def rss_mb(pids: Sequence[int]) -> float:
    return round(sum(_rss_mb(pid) for pid in pids), 1)


def _rss_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024
