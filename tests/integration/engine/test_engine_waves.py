"""Two engine services of one run, each with a server of its own that speaks vLLM's wire."""

import sys
from contextlib import AsyncExitStack
from pathlib import Path

from engine_fixtures import publish
from engine_pair import RUN, engine, one_after_another, served, tell

from openforge.bus import Bus, BusSettings
from openforge.bus.server import free_port
from openforge.models import tiny
from openforge.runs import RunConfig, submit
from openforge.runs.config import EngineSection, EnvironmentSection, ModelSection, RunSection

PATIENCE_S = 120.0
_STAND_IN = Path("tests/support/vllm_stand_in.py").absolute()


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
            url = f"http://127.0.0.1:{free_port()}"
            await stack.enter_async_context(engine(name, url, bus_settings, str(interpreter)))
        await tell(bus, publish(tmp_path / "w", models[0], 0), 0)
        await served(bus, 0, PATIENCE_S)
        for version in (1, 2):
            await tell(bus, publish(tmp_path / "w", models[version % 2], version), version)
            assert one_after_another(await served(bus, version, PATIENCE_S))
