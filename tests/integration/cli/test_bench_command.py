"""Tools and what they start end together."""

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import pytest


async def test_a_measurement_does_not_outlive_the_command() -> None:
    command = [sys.executable, "-m", "openforge.cli", "bench", "schedule", "--json"]
    asked = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    await dies_with(asked, b"openforge.cli.bench.schedule")


@pytest.mark.parametrize("tool", ["lags.measured", "children"])  # the second is that of `transfer`
async def test_a_run_does_not_outlive_the_tool_that_started_it(tmp_path: Path, tool: str) -> None:
    run_file = tmp_path / "run.toml"
    os.mkfifo(run_file)  # who opens it waits
    code = f"from openforge.cli.{tool} import train; train({str(run_file)!r}, ())"
    asked = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stderr=asyncio.subprocess.DEVNULL)
    await dies_with(asked, str(run_file).encode())


async def dies_with(asked: asyncio.subprocess.Process, named: bytes) -> None:
    """The child of `asked` whose command line has `named`."""
    async with asyncio.timeout(120):
        while not (started := Path(f"/proc/{asked.pid}/task/{asked.pid}/children").read_text().split()):
            await asyncio.sleep(0.05)
        child = Path(f"/proc/{started[0]}/cmdline")
        while b"openforge.cli" not in child.read_bytes() or named not in child.read_bytes():
            await asyncio.sleep(0.05)
        asked.kill()
        await asked.wait()
        with contextlib.suppress(OSError):  # it is gone while it is looked at
            while child.read_bytes():
                await asyncio.sleep(0.05)
