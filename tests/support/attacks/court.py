"""The services that an attempt passes through, in this process and on a driver of choice: a manager, a proxy with an
engine from a script, a verifier. Attempts are asked for and their verdicts waited for.
"""

import asyncio
import contextlib
import io
import tarfile
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from byte_tokenizer import byte_tokenizer_folder
from proxy_fixtures import RUN, ProxyAtWork, run_config
from stub_engine import StubEngine

from openforge.bus import Bus, BusSettings
from openforge.bus.server import NatsServer, ServerConfig, free_port
from openforge.protos import (
    EpisodeEnded,
    EpisodeFailed,
    EpisodeLimits,
    EpisodeRequested,
    TaskRef,
    TrajectoryVerified,
    env_token,
)
from openforge.runs import submit
from openforge.sandbox_manager import serve as manager
from openforge.sandbox_manager.settings import Settings as ManagerSettings
from openforge.verifier import serve as verifier
from openforge.verifier.settings import Settings as VerifierSettings

ENVIRONMENT = Path(__file__).parent / "env.py"
LIMITS = EpisodeLimits(timeout_s=30.0, turns=3, tokens_per_turn=16, memory_mb=192, pids=64, disk_mb=16)
Verdict = TrajectoryVerified | EpisodeFailed


class Court:
    def __init__(self, bus: Bus, proxy: ProxyAtWork, engine: StubEngine, sockets: Path) -> None:
        self.bus = bus
        self.proxy = proxy
        self.engine = engine
        self.sockets = sockets

    async def request(self, task: str) -> None:
        """One attempt at a task; its episode bears the task's name."""
        await self.bus.tell(
            EpisodeRequested(
                run=RUN,
                episode=task,
                attempt=0,
                group="g",
                purpose="train",
                task=TaskRef(env=str(ENVIRONMENT), task=task, seed=0),
                harness="agent",
                env_kind="command",
                limits=LIMITS,
                seed=0,
            )
        )

    async def ended(self, task: str) -> EpisodeEnded:
        async with asyncio.timeout(120):
            while (told := await self.bus.find(EpisodeEnded, RUN, task, 0)) is None:
                await asyncio.sleep(0.05)
            return told.fact

    async def left(self, ended: EpisodeEnded, name: str) -> str:
        """A file of the attempt's artifacts."""
        assert ended.artifacts is not None
        with tarfile.open(fileobj=io.BytesIO(await self.bus.blobs.get(ended.artifacts))) as tar:
            file = tar.extractfile(f"workspace/{name}")
            assert file is not None
            return file.read().decode()

    async def verdict(self, task: str) -> Verdict:
        async with asyncio.timeout(180):
            while True:
                if verified := await self.bus.find(TrajectoryVerified, RUN, env_token(str(ENVIRONMENT)), "agent", task):
                    return verified.fact
                if failed := await self.bus.find(EpisodeFailed, RUN, task, 0):
                    return failed.fact
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def sitting(folder: Path, **driver: Any) -> AsyncIterator[Court]:
    """`driver` are settings that choose and configure it."""
    server = NatsServer(ServerConfig(folder=str(folder / "nats"), port=free_port()))
    engine = StubEngine()
    with tempfile.TemporaryDirectory(prefix="of-") as sockets:
        await server.start()
        await engine.start()
        settings = BusSettings(url=server.url, connect_timeout_s=10.0)
        try:
            async with Bus.connect(settings, name="court") as bus, Bus.connect(settings, name="manager") as second:
                await bus.set_up()
                config = run_config(
                    byte_tokenizer_folder(folder / "model"), environment={"name": str(ENVIRONMENT), "harness": "agent"}
                )
                await submit(bus, config)
                proxy = ProxyAtWork(bus, engine.url, config, Path(sockets))
                await proxy.start()
                stop = asyncio.Event()
                managing = ManagerSettings(
                    run=RUN, home=folder / "manager", sockets=Path(sockets), manager_slots=3, **driver
                )
                verifying = VerifierSettings(run=RUN, home=folder / "verifier", verifier_slots=3, **driver)
                services = [
                    asyncio.create_task(manager.serve(managing, second, stop)),
                    asyncio.create_task(verifier.serve(verifying, second, stop)),
                ]
                try:
                    yield Court(bus, proxy, engine, Path(sockets))
                finally:
                    stop.set()
                    await asyncio.gather(*services)
                    await proxy.close_clients()
                    await proxy.stop()
        finally:
            await engine.stop()
            await server.kill()
