"""The engine as a process of its own on a real bus: it serves the newest policy and says so."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from engine_fixtures import publish
from reference_model import largest_difference, reference_logprobs

from openforge.bus import Bus, BusSettings
from openforge.bus.server import free_port
from openforge.models import tiny
from openforge.protos import EngineMeasured, PolicyPublished, PolicyServed
from openforge.runs import RunConfig, submit
from openforge.runs.config import EngineSection, EnvironmentSection, ModelSection, PacingSection, RunSection
from openforge.weights import Written, read_manifest
from openforge.weights.stores import store_at

RUN = "r1"
PATIENCE_S = 90.0
_SOURCES = [str(Path(folder).absolute()) for folder in ("protos", "libs", "services")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [tiny(root / f"m{seed}", seed=seed) for seed in (0, 1)]


@asynccontextmanager
async def _engine(settings: BusSettings, url: str, cache: str = "") -> AsyncIterator[asyncio.subprocess.Process]:
    """The service as a process; ended if it still lives."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(_SOURCES),
        "OPENFORGE_RUN": RUN,
        "OPENFORGE_NATS_URL": settings.url,
        "OPENFORGE_ENGINE_URL": url,
        "OPENFORGE_MEASURE_EVERY_S": "0.5",
        "OPENFORGE_DIE_WITH_PARENT": "1",
        "OPENFORGE_WEIGHT_CACHE": cache,
    }
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "openforge.engine", env=env)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(process.wait(), 30)


async def _submit(bus: Bus, model: Path) -> None:
    config = RunConfig(
        run=RunSection(name=RUN, steps=3),
        model=ModelSection(path=str(model)),
        engine=EngineSection(dtype="float32"),
        environment=EnvironmentSection(name="letters", harness="letters"),
        pacing=PacingSection(in_flight_least=8),
    )
    await submit(bus, config)


async def _publish(bus: Bus, written: Written, where: str = "") -> PolicyPublished:
    """In the folder where it was written, or on the bus, from where the engine has to fetch it."""
    manifest = read_manifest(written.path)
    store = store_at(where, RUN, written.path.parent, bus.weights)
    published = PolicyPublished(
        run=RUN,
        version=manifest.version,
        incarnation=manifest.incarnation,
        location=await store.publish(written.path, written.digest),
        digest=written.digest,
        bytes=written.bytes,
    )
    await bus.tell(published)
    return published


async def _served(bus: Bus, version: int, incarnation: int = 0) -> PolicyServed:
    deadline = time.monotonic() + PATIENCE_S
    while not (tolds := await bus.read(PolicyServed, RUN, version, incarnation)):
        assert time.monotonic() < deadline, f"version {version} was never told as served"
        await asyncio.sleep(0.05)
    return tolds[0].fact


async def _logprob_error(url: str, model: Path, version: int) -> float:
    """How far an answer's log-probs are from the model's own."""
    params = {"max_tokens": 12, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        body = {"model": "policy", "token_ids": [1, 30, 31], "sampling_params": params}
        choice = (await client.post("/inference/v1/generate", json=body)).json()["choices"][0]
    assert choice["weight_versions"] == [{"version": str(version), "start": 0, "end": 12}]
    stated = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return largest_difference(stated, reference_logprobs(model, [1, 30, 31], choice["token_ids"]))


async def test_it_serves_what_is_published_again_and_again_and_refuses_what_is_broken(
    bus: Bus, bus_settings: BusSettings, models: list[Path], tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    await _submit(bus, models[0])
    skipped = publish(tmp_path / "w", models[0], 0)
    newest = publish(tmp_path / "w", models[1], 1)
    await _publish(bus, skipped)
    await _publish(bus, newest, "nats")
    async with _engine(bus_settings, url, str(tmp_path / "cache")) as process:
        served = await _served(bus, 1)
        assert (served.digest, served.version) == (newest.digest, 1)
        assert served.probe_error < 1e-4
        assert served.load_s > 0
        assert await bus.read(PolicyServed, RUN, 0) == []
        assert await _logprob_error(url, models[1], 1) < 1e-4

        broken = publish(tmp_path / "w", models[0], 2)
        (broken.path / "model.safetensors").write_bytes(b"nothing")
        await _publish(bus, broken, "nats")
        await _publish(bus, publish(tmp_path / "w", models[0], 3), "nats")
        again = await _served(bus, 3)
        assert again.engine == served.engine
        assert await bus.read(PolicyServed, RUN, 2) == []
        assert await _logprob_error(url, models[0], 3) < 1e-4

        await _publish(bus, publish(tmp_path / "w", models[1], 3, incarnation=1))
        await _served(bus, 3, 1)
        assert await _logprob_error(url, models[1], 3) < 1e-4
        assert process.returncode is None
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0


async def test_it_says_how_busy_it_is_while_it_has_anything_to_do(
    bus: Bus, bus_settings: BusSettings, models: list[Path], tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    await _submit(bus, models[0])
    await _publish(bus, publish(tmp_path / "w", models[0], 0))
    body = {"model": "policy", "token_ids": [1, 30], "sampling_params": {"max_tokens": 1500, "ignore_eos": True}}
    async with _engine(bus_settings, url), httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        served = await _served(bus, 0)
        asking = [asyncio.create_task(client.post("/inference/v1/generate", json=body)) for _ in range(3)]
        while not (tolds := await bus.read(EngineMeasured, RUN, served.engine)):
            assert not all(call.done() for call in asking), "they ended, and nothing was said"
            await asyncio.sleep(0.05)
        await asyncio.gather(*asking)
    fact = tolds[0].fact
    assert 0 < fact.running <= 3
    assert 0 < fact.kv_use < 1


async def test_it_answers_503_until_something_is_published_and_ends_loudly_if_nothing_can_be_served(
    bus: Bus, bus_settings: BusSettings, models: list[Path], tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    await _submit(bus, models[0])
    async with _engine(bus_settings, url) as process, httpx.AsyncClient(base_url=url) as client:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                assert (await client.get("/health")).status_code == 503
                break
            except httpx.ConnectError:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.1)
        broken = publish(tmp_path / "w", models[0], 0)
        (broken.path / "config.json").write_text("{}")
        await _publish(bus, broken)
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 1
    assert await bus.read(PolicyServed, RUN) == []
