"""`openforge bench` and the measurement that it starts end together."""

import asyncio
import contextlib
import sys
from pathlib import Path


async def test_a_measurement_does_not_outlive_the_command() -> None:
    command = [sys.executable, "-m", "openforge.cli", "bench", "schedule", "--json"]
    asked = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(120):
        while not (started := Path(f"/proc/{asked.pid}/task/{asked.pid}/children").read_text().split()):
            await asyncio.sleep(0.05)
        measuring = Path(f"/proc/{started[0]}/cmdline")
        while b"openforge.cli.bench.schedule" not in measuring.read_bytes():
            await asyncio.sleep(0.05)
        asked.kill()
        await asked.wait()
        with contextlib.suppress(OSError):  # it is gone while it is looked at
            while measuring.read_bytes():
                await asyncio.sleep(0.05)
