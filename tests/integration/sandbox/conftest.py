"""Real sandboxes on this host; without root or bubblewrap these tests say why they skip."""

import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from openforge.sandbox.contract import Sandbox, SandboxLimits, SandboxSpec
from openforge.sandbox.process import CannotIsolate, ProcessDriver

SMALL = SandboxLimits(memory_mb=192, pids=64, disk_mb=16)


def full_driver(state_dir: Path, proxy_socket: Path | None = None) -> ProcessDriver:
    try:
        return ProcessDriver(state_dir, proxy_socket=proxy_socket, owner=f"test-{secrets.token_hex(3)}")
    except CannotIsolate as reason:
        if os.environ.get("OPENFORGE_REQUIRE_SANDBOXES"):
            raise
        pytest.skip(str(reason))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def driver(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ProcessDriver]:
    made = full_driver(tmp_path_factory.mktemp("state"))
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def box(driver: ProcessDriver) -> AsyncIterator[Sandbox]:
    made = await driver.create(SandboxSpec(name="box", limits=SMALL))
    yield made
    await made.stop()
