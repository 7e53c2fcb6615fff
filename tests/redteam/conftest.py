"""What the red team needs, and `build/redteam.json`, written when its last attack is over."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from attacks.attack import Outcomes, Stakes
from attacks.stakes import laid_out
from sandbox_fixtures import box, case, daemons, driver, used

__all__ = ["box", "case", "daemons", "driver", "used"]
REPORT = Path(__file__).parents[2] / "build" / "redteam.json"


@pytest.fixture(scope="session")
def outcomes() -> Iterator[Outcomes]:
    made = Outcomes()
    yield made
    made.write(REPORT)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stakes() -> AsyncIterator[Stakes]:
    async with laid_out() as made:
        yield made
