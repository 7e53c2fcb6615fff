"""Real sandboxes on this host."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from sandbox_drivers import SMALL, full_driver

from openforge.sandbox.contract import Sandbox, SandboxSpec
from openforge.sandbox.process import ProcessDriver


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
