"""Two engine services of one run, each with a server of its own, that change their weights in two waves."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from openforge.bus import Bus, BusSettings, Told
from openforge.protos import PolicyPublished, PolicyServed
from openforge.weights import Written

RUN = "r1"
_SOURCES = os.pathsep.join(str(Path(folder).absolute()) for folder in ("protos", "libs", "services"))


@asynccontextmanager
async def engine(name: str, url: str, bus: BusSettings, interpreter: str) -> AsyncIterator[None]:
    env = os.environ | {
        "PYTHONPATH": _SOURCES,
        "OPENFORGE_RUN": RUN,
        "OPENFORGE_NATS_URL": bus.url,
        "OPENFORGE_ENGINE_URL": url,
        "OPENFORGE_ENGINE_NAME": name,
        "OPENFORGE_ENGINE_WAVES": "2",
        "OPENFORGE_VLLM_PYTHON": interpreter,
        "OPENFORGE_DIE_WITH_PARENT": "1",
    }
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "openforge.engine", env=env)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 60)


async def tell(bus: Bus, written: Written, version: int) -> None:
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


async def served(bus: Bus, version: int, patience_s: float, engines: int = 2) -> dict[str, Told[PolicyServed]]:
    """By so many engines."""
    deadline = time.monotonic() + patience_s
    while len(tolds := await bus.read(PolicyServed, RUN, version, 0)) < engines:
        assert time.monotonic() < deadline, f"version {version} is served by {[told.fact.engine for told in tolds]}"
        await asyncio.sleep(0.1)
    return {told.fact.engine: told for told in tolds}


def one_after_another(served: Mapping[str, Told[PolicyServed]]) -> bool:
    """`b` began when `a` served."""
    return served["b"].at - served["b"].fact.load_s >= served["a"].at
