"""Two engine services of one run, each with a server of its own that speaks vLLM's wire."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from engine_fixtures import publish

from openforge.bus import Bus, BusSettings, Told
from openforge.bus.server import free_port
from openforge.models import tiny
from openforge.protos import PolicyPublished, PolicyServed
from openforge.runs import RunConfig, submit
from openforge.runs.config import EngineSection, EnvironmentSection, ModelSection, RunSection
from openforge.weights import Written

RUN = "r1"
PATIENCE_S = 120.0
_STAND_IN = Path("tests/support/vllm_stand_in.py").absolute()
_SOURCES = os.pathsep.join(str(Path(folder).absolute()) for folder in ("protos", "libs", "services"))


@asynccontextmanager
async def _engine(name: str, bus: BusSettings, interpreter: Path) -> AsyncIterator[None]:
    env = os.environ | {
        "PYTHONPATH": _SOURCES,
        "OPENFORGE_RUN": RUN,
        "OPENFORGE_NATS_URL": bus.url,
        "OPENFORGE_ENGINE_URL": f"http://127.0.0.1:{free_port()}",
        "OPENFORGE_ENGINE_NAME": name,
        "OPENFORGE_ENGINE_WAVES": "2",
        "OPENFORGE_VLLM_PYTHON": str(interpreter),
        "OPENFORGE_DIE_WITH_PARENT": "1",
    }
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "openforge.engine", env=env)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 30)


async def _tell(bus: Bus, written: Written, version: int) -> None:
    await bus.tell(
        PolicyPublished(
            run=RUN,
            version=version,
            incarnation=0,
            location=str(written.path),
            digest=written.digest,
            bytes=written.bytes,
        )
    )


async def _both_serve(bus: Bus, version: int) -> dict[str, Told[PolicyServed]]:
    deadline = time.monotonic() + PATIENCE_S
    while len(tolds := await bus.read(PolicyServed, RUN, version, 0)) < 2:
        assert time.monotonic() < deadline, f"version {version} is served by {[told.fact.engine for told in tolds]}"
        await asyncio.sleep(0.1)
    return {told.fact.engine: told for told in tolds}


async def test_servers_change_their_weights_one_after_another_so_that_one_always_samples(
    bus: Bus, bus_settings: BusSettings, tmp_path: Path
) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nshift 2 # -m and the module\nexec {sys.executable} {_STAND_IN} "$@"\n')
    interpreter.chmod(0o755)
    models = [tiny(tmp_path / f"m{seed}", seed=seed) for seed in (0, 1)]
    await submit(
        bus,
        RunConfig(
            run=RunSection(name=RUN, steps=3),
            model=ModelSection(path=str(models[0]), context=256),
            engine=EngineSection(kind="vllm", dtype="float32"),
            environment=EnvironmentSection(name="letters", harness="letters"),
        ),
    )
    async with AsyncExitStack() as stack:
        for name in ("a", "b"):
            await stack.enter_async_context(_engine(name, bus_settings, interpreter))
        await _tell(bus, publish(tmp_path / "w", models[0], 0), 0)
        await _both_serve(bus, 0)
        for version in (1, 2):
            await _tell(bus, publish(tmp_path / "w", models[version % 2], version), version)
            served = await _both_serve(bus, version)
            began_b = served["b"].at - served["b"].fact.load_s
            assert began_b >= served["a"].at
