"""Sandboxes made ahead: as good as new ones, and as gone at the end."""

import asyncio
from pathlib import Path

import pytest
from sandbox_drivers import SMALL, full_driver

from openforge.sandbox.admission import Admission
from openforge.sandbox.contract import SandboxLimits, SandboxSpec
from openforge.sandbox.pool import Pool


async def until_spare(pool: Pool, count: int) -> None:
    async with asyncio.timeout(120):
        while pool.spare < count:
            await asyncio.sleep(0.02)


async def test_a_pool_hands_out_what_is_ready_makes_what_is_not_and_fills_up_again(tmp_path: Path) -> None:
    driver = full_driver(tmp_path / "state")
    pool = Pool(driver, Admission(at_once=2, waiting=10))
    spec = SandboxSpec(name="asked", limits=SMALL, network="none", labels={"run": "r"}, env={"COLOUR": "blue"})
    pool.keep(SandboxSpec(name="any", limits=SMALL, network="none"), 2)
    await until_spare(pool, 2)
    first = pool.take(spec)
    assert first is not None
    assert (await first.exec("echo $COLOUR; ls -A", timeout_s=20)).stdout == b"blue\n"
    assert pool.take(SandboxSpec(name="other", limits=SandboxLimits(), network="none")) is None
    assert pool.take(SandboxSpec(name="other", limits=SMALL, network="open")) is None
    await until_spare(pool, 2)
    second = await pool.create(spec)
    assert second.id != first.id
    other = await pool.create(SandboxSpec(name="made", limits=SMALL, network="open"))
    assert other.id.startswith("made-")
    for box in (first, second, other):
        await box.stop()
    await pool.close()
    assert list((tmp_path / "state" / "boxes").iterdir()) == []


async def test_a_spare_that_died_is_not_handed_out(tmp_path: Path) -> None:
    driver = full_driver(tmp_path / "state")
    pool = Pool(driver, Admission(at_once=2, waiting=10))
    spec = SandboxSpec(name="asked", limits=SMALL, network="none")
    pool.keep(spec, 1)
    await until_spare(pool, 1)
    (dead,) = pool._ready[pool._shape_of(spec)]
    await dead.stop()
    living = await pool.create(spec)
    assert (await living.exec("echo alive", timeout_s=20)).stdout == b"alive\n"
    await living.stop()
    await pool.close()


@pytest.mark.parametrize("at_once", [1, 4])
async def test_many_at_once_are_all_made(tmp_path: Path, at_once: int) -> None:
    driver = full_driver(tmp_path / "state")
    pool = Pool(driver, Admission(at_once=at_once, waiting=10))
    boxes = await asyncio.gather(*(pool.create(SandboxSpec(name=f"b{n}", limits=SMALL)) for n in range(8)))
    assert len({box.id for box in boxes}) == 8
    await asyncio.gather(*(box.stop() for box in boxes))
    await pool.close()
