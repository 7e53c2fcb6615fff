"""Attacks from within a sandbox, by the commands that an agent can run: none wins anything on any driver.

Each attack runs without walls too, where it must win: one that could not would prove nothing.
"""

import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from attacks import bombs, host, kernel, leavings, network
from attacks.attack import Attack, Outcomes, Stakes
from attacks.places import Boxed, Unguarded, without_walls
from container_daemons import Daemons
from sandbox_drivers import CASES, KUBERNETES, Case
from sandbox_fixtures import borrowed, on

from openforge.sandbox.contract import Box, SandboxDriver
from openforge.sandbox.process import uids

pytestmark = [pytest.mark.redteam, pytest.mark.asyncio(loop_scope="module")]
ATTACKS = (*host.ATTACKS, *kernel.ATTACKS, *network.ATTACKS, *bombs.ATTACKS, *leavings.ATTACKS)


ON_THIS_HOST = on(*(case for case in CASES if case is not KUBERNETES))


def spec_of(attack: Attack, case: Case, stakes: Stakes) -> Any:
    binds = {inside: str(stakes.folder / name) for inside, name in attack.spec.get("binds", {}).items()}
    return case.spec("attacked", **{**attack.spec, "binds": binds})


@pytest_asyncio.fixture(loop_scope="module")
async def place(
    attack: Attack, case: Case, driver: SandboxDriver, used: list[Box], stakes: Stakes
) -> AsyncIterator[Boxed]:
    async with contextlib.AsyncExitStack() as ends:
        if attack.spec:
            box = await driver.create(spec_of(attack, case, stakes))
            ends.push_async_callback(box.stop)
        else:
            box = await ends.enter_async_context(borrowed(case, driver, used))
        made = Boxed(box, driver, case, stakes)
        ends.push_async_callback(made.end_neighbours)
        yield made


@ON_THIS_HOST
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_an_attack_wins_nothing(attack: Attack, place: Boxed, stakes: Stakes, outcomes: Outcomes) -> None:
    await lost(attack, place, stakes, outcomes)


@on(KUBERNETES)
@pytest.mark.parametrize(
    "attack", [attack for attack in ATTACKS if attack.guard == "owner"], ids=lambda attack: attack.name
)
async def test_an_attack_on_our_own_code_wins_nothing_in_a_pod(
    attack: Attack, place: Boxed, stakes: Stakes, outcomes: Outcomes
) -> None:
    """The cluster for tests has our code inside and none of a cluster's walls."""
    await lost(attack, place, stakes, outcomes)


async def lost(attack: Attack, place: Boxed, stakes: Stakes, outcomes: Outcomes) -> None:
    loot = await attack.run(place, stakes)
    if not await place.alive():
        loot = loot or "the sandbox is dead"
    outcomes.add(attack.name, place.name, loot, place.how)
    assert not loot


LEAVE = """
for f in /tmp /dev/shm /workspace /tests /var/tmp; do echo WON > $f/left; done
(setsid sleep 7272 >/dev/null 2>&1 &)
"""
FIND = """
cat /tmp/left /dev/shm/left /workspace/left /tests/left /var/tmp/left
cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -q 'sleep 727[2]' && echo WON
true
"""


@ON_THIS_HOST
async def test_nothing_is_left_for_the_next_sandbox_with_the_same_user(
    case: Case, daemons: Daemons, tmp_path: Path, outcomes: Outcomes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver has one user number to give, and each sandbox finds what it left itself."""
    monkeypatch.setattr(uids, "_BLOCK", 1)
    driver = await case.make(tmp_path, None, daemons.socket(case.daemon) if case.daemon else None)
    found = []
    for _ in range(2):
        box = await driver.create(case.spec("user"))
        found.append((await box.exec(["/bin/bash", "-c", FIND], timeout_s=30)).stdout.decode())
        await box.exec(["/bin/bash", "-c", LEAVE], timeout_s=30)
        assert (await box.exec(["/bin/bash", "-c", FIND], timeout_s=30)).stdout.count(b"WON") == 6
        await box.stop()
    await driver.close()
    loot = "".join(found)
    outcomes.add("former-user-of-the-number", case.name, loot, "nothing of the sandbox before was found")
    assert not loot


@pytest_asyncio.fixture(loop_scope="module")
async def unguarded(stakes: Stakes) -> AsyncIterator[Unguarded]:
    folder = Path(tempfile.mkdtemp(prefix="unguarded-", dir="/tmp"))
    async with without_walls(stakes, folder) as made:
        yield made
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_the_same_attack_wins_where_there_are_no_walls(
    attack: Attack, unguarded: Unguarded, stakes: Stakes
) -> None:
    assert await attack.run(unguarded, stakes)
