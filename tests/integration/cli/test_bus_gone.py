"""A server of the bus that cannot be kept running: the run ends for its last words instead of waiting for it."""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from openforge.cli.conduct import bus_at_home
from openforge.cli.follow import Watch
from openforge.cli.home import Home


async def killed_until_given_up(watch: Watch) -> None:
    """As often as it comes back."""
    while not watch.bus_gone:
        process = watch.processes[0].process
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        await asyncio.sleep(0.05)


async def test_a_server_that_is_given_up_ends_the_block_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    home = Home("busless", tmp_path)
    async with asyncio.timeout(240):
        async with bus_at_home(home) as (_, _, watch, _):
            assert home.sockets.is_dir()
            await killed_until_given_up(watch)
    assert "nats ended with exit code -9: it died 6 times in a row" in watch.note
    assert not home.sockets.exists()
    assert home.address() is None
