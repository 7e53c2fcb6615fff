"""Start, work, stop."""

import asyncio
import shutil
from pathlib import Path

from openforge.bus import Bus
from openforge.env.verify import Checker
from openforge.protos import EpisodeSealed
from openforge.sandbox.choice import open_driver
from openforge.service import cancel, log
from openforge.verifier.settings import Settings
from openforge.verifier.worker import Verifier

_ACK_WAIT_S = 10.0
"""How long the work of a killed verifier waits for the next one. Live ones say three times within it that they are."""


async def serve(settings: Settings, bus: Bus, stop: asyncio.Event) -> None:
    """Verify until `stop`; what is in work then is given back to the bus, its boxes are ended."""
    state = settings.home.absolute() / "verifier"
    scratch = _fresh(state / "scratch")
    owner = f"verifier-{settings.verifier_name}"
    driver = await open_driver(settings, state / "boxes", owner=owner, allow_reduced=True)
    verifier = Verifier(bus, Checker(driver, scratch), settings.verifier_name)
    try:
        left = await driver.reconcile({"owner": owner})
        log.info("ready to verify", isolation=driver.isolation, slots=settings.verifier_slots, boxes_left=left)
        working = asyncio.create_task(
            bus.work(
                service="verifier",
                fact=EpisodeSealed,
                handler=verifier.handle,
                run=settings.run,
                in_flight=settings.verifier_slots,
                ack_wait_s=_ACK_WAIT_S,
                attempts=settings.verifier_attempts,
                on_dead=verifier.on_dead,
            )
        )
        await _until(working, stop)
    finally:
        await verifier.close()
        await driver.close()


async def _until(working: "asyncio.Task[None]", stop: asyncio.Event) -> None:
    """Return when `stop` is set, raise what ended the work before that."""
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    await cancel(working, stopping)
    if not (stop.is_set() and working.cancelled()):
        working.result()


def _fresh(folder: Path) -> Path:
    """An empty folder; what a killed verifier left in it is of no use to anybody."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
