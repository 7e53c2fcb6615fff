"""Fixtures of real sandboxes on this host, for the suites that run on every driver: imported by their `conftest.py`."""

import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from container_daemons import Daemons, running_daemons
from sandbox_drivers import CASES, Case

from openforge.sandbox.contract import Box, ExecResult, Sandbox, SandboxDriver


@pytest.fixture(scope="session")
def daemons() -> Iterator[Daemons]:
    yield from running_daemons()


def marked(case: Case) -> object:
    return pytest.param(case, id=case.name, marks=[pytest.mark.containers] if case.daemon else [])


def on(*cases: Case) -> pytest.MarkDecorator:
    """The test runs on these only. In a mark of its own, so that what a case needs is made once."""
    return pytest.mark.parametrize("case", [marked(case) for case in cases], indirect=True)


async def sh(box: Sandbox, command: str, timeout_s: float = 60.0, output_cap: int = 1 << 20) -> ExecResult:
    return await box.exec(command, timeout_s=timeout_s, output_cap=output_cap)


@pytest.fixture(scope="module", params=[marked(case) for case in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    made: Case = request.param
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def driver(
    case: Case, daemons: Daemons, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SandboxDriver]:
    socket = daemons.socket(case.daemon) if case.daemon else None
    made = await case.make(tmp_path_factory.mktemp("state"), None, socket)
    yield made
    await made.close()


@pytest.fixture(scope="module")
def used(driver: SandboxDriver) -> list[Box]:
    """A container that a test has left clean, for the next one: they are dear. Ended with their driver."""
    return []


@pytest_asyncio.fixture(loop_scope="module")
async def box(case: Case, driver: SandboxDriver, used: list[Box]) -> AsyncIterator[Box]:
    async with borrowed(case, driver, used) as made:
        yield made


@contextlib.asynccontextmanager
async def borrowed(case: Case, driver: SandboxDriver, used: list[Box]) -> AsyncIterator[Box]:
    made = used.pop() if used else await driver.create(case.spec("box"))
    try:
        yield made
    finally:
        if case.daemon and await _cleaned(made):
            used.append(made)
        else:
            await made.stop()


async def _cleaned(box: Box) -> bool:
    if not box.alive:
        return False
    await box.kill_all()
    sweep = "cd /; chmod -R u+rwX /workspace /tmp /tests; find /workspace /tmp /tests -mindepth 1 -user 1000 -delete"
    return (await box.exec(sweep, timeout_s=60)).exit_code == 0
