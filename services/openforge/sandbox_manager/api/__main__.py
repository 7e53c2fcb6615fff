"""`python -m openforge.sandbox_manager.api`: the API alone, without a run. With `OPENFORGE_NATS_URL` replicas share."""

import asyncio
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from openforge.bus import BadSettings, Bus, BusSettings
from openforge.sandbox.choice import open_driver
from openforge.sandbox.contract import CannotIsolate
from openforge.sandbox_manager.api.serve import Api
from openforge.sandbox_manager.api.settings import ApiSettings
from openforge.service import listen_for_signals, set_up_logs
from openforge.service.settings import settings_from_env


class AloneSettings(ApiSettings, frozen=True, kw_only=True):
    """`home` holds the records of its sandboxes. `manager` tells replicas apart. `trusted_only` accepts reduced
    isolation, where there is no root."""

    home: Path = Path("/var/lib/openforge")
    manager: str = "sandboxes"
    trusted_only: bool = False


async def live(settings: AloneSettings) -> None:
    stop = asyncio.Event()
    listen_for_signals(stop)
    async with AsyncExitStack() as stack:
        bus: Bus | None = None
        if os.environ.get("OPENFORGE_NATS_URL"):
            bus = await stack.enter_async_context(Bus.connect(BusSettings.from_env(), name="sandbox_api"))
        driver = await open_driver(
            settings, settings.home / "sandboxes", owner=settings.manager, allow_reduced=settings.trusted_only
        )
        stack.push_async_callback(driver.close)
        labels = {"service": "sandbox_api", "manager": settings.manager}
        api = Api(settings, driver, labels=labels, bus=bus, replica=settings.manager if bus else "")
        stack.push_async_callback(api.close)
        await api.start()
        print(f"sandbox API on http://{settings.sandbox_api_host}:{api.port}", flush=True)
        await stop.wait()


def main() -> None:
    set_up_logs("sandbox_api", level=os.environ.get("OPENFORGE_LOG_LEVEL") or "info")
    try:
        asyncio.run(live(settings_from_env(AloneSettings)))
    except (BadSettings, CannotIsolate, OSError) as error:
        sys.exit(f"openforge: {error}")


if __name__ == "__main__":
    main()
