"""Real sandboxes on this host: `driver` and `box` of every case of the contract."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from sandbox_drivers import CASES, Case

from openforge.sandbox.contract import Box, SandboxDriver


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    made: Case = request.param
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def driver(case: Case, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SandboxDriver]:
    made = case.make(tmp_path_factory.mktemp("state"), None)
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def box(case: Case, driver: SandboxDriver) -> AsyncIterator[Box]:
    made = await driver.create(case.spec("box"))
    yield made
    await made.stop()
