"""The sandbox API on a port of its own, with real sandboxes behind it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from sandbox_clients import KEY, SdkLikeClient
from sandbox_drivers import full_driver

from openforge.sandbox_manager.api.serve import Api
from openforge.sandbox_manager.api.settings import ApiSettings

OURS, READ = "key-of-ours-alone", "key-that-only-reads"
SETTINGS = {
    "sandbox_api_keys": (KEY, f"{OURS}=ours", f"{READ}=ours/read"),
    "sandbox_api_memory_mb": 256,
    "sandbox_api_disk_mb": 16,
    "sandbox_api_sweep_s": 0.1,
}

StartApi = Callable[..., Awaitable[Api]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def start_api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StartApi]:
    """Starts one with other settings."""
    started: list[tuple[Api, Any]] = []

    async def start(bus: Any = None, replica: str = "", **changes: Any) -> Api:
        driver = full_driver(tmp_path_factory.mktemp("state"))
        api = Api(ApiSettings(**{**SETTINGS, **changes}), driver, labels={"test": "api"}, bus=bus, replica=replica)
        started.append((api, driver))
        await api.start()
        return api

    yield start
    for api, driver in started:
        await api.close()
        await driver.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(start_api: StartApi) -> Api:
    return await start_api()


@pytest_asyncio.fixture(loop_scope="module")
async def client(api: Api) -> AsyncIterator[SdkLikeClient]:
    async with SdkLikeClient(f"http://127.0.0.1:{api.port}/") as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_box(api: Api) -> str:
    """One sandbox for tests that only look at it, or spoil nothing."""
    async with SdkLikeClient(f"http://127.0.0.1:{api.port}") as made:
        return str((await made.create())["sandbox_id"])
