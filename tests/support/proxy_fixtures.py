"""A proxy at work in this process: real bus, real sockets, an engine from a script."""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import openai
import pytest
from byte_tokenizer import byte_tokenizer_folder
from stub_engine import StubEngine

from openforge.bus import Bus
from openforge.bus.server import free_port
from openforge.protos import (
    KEY_BUCKET,
    AttemptKey,
    EndReason,
    EpisodeEnded,
    EpisodeSealed,
    TurnRecorded,
    key_entry,
)
from openforge.proxy.serve import serve
from openforge.proxy.settings import Settings
from openforge.runs import RunConfig, config_of, submit

RUN = "r"


def run_config(model: Path, *, context: int = 4096, **changes: object) -> RunConfig:
    """A run on a model folder; `changes` are sections by name."""
    said = {
        "run": {"name": RUN, "steps": 1},
        "model": {"path": str(model), "context": context},
        "environment": {"name": "shell", "harness": "mini"},
        "sampling": {"max_tokens": 512},
        **changes,
    }
    return config_of(msgspec.json.encode(said).decode())


class ProxyAtWork:
    def __init__(self, bus: Bus, engine_url: str, config: RunConfig, sockets: Path) -> None:
        self.bus = bus
        self.config = config
        self.settings = Settings(
            run=RUN,
            engine_url=engine_url,
            proxy_url=f"http://127.0.0.1:{free_port()}",
            sockets=str(sockets),
            engine_patience_s=15.0,
            proxy_grace_s=10.0,
            proxy_drain_s=1.0,
        )
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._clients: list[openai.AsyncOpenAI] = []

    def set(self, **changes: object) -> None:
        """Other settings for the next start."""
        self.settings = msgspec.structs.replace(self.settings, **changes)

    async def start(self) -> None:
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(serve(self.settings, self.bus, self._stop))
        port = int(self.settings.proxy_url.rsplit(":", 1)[1])
        while not self._task.done():
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                await writer.wait_closed()
                return
        await self._task

    async def stop(self) -> None:
        self._stop.set()
        if self._task is not None:
            await self._task
            self._task = None

    def base_url(self, episode: str = "e-0", attempt: int = 0) -> str:
        return f"{self.settings.proxy_url}/ep/{episode}.{attempt}/v1"

    async def key(
        self, episode: str = "e-0", attempt: int = 0, *, turns: int = 20, tokens: int = 128, lives_s: float = 60.0
    ) -> str:
        secret = f"of-{episode}-{attempt}-secret"
        entry = AttemptKey(
            run=RUN,
            episode=episode,
            attempt=attempt,
            turns=turns,
            tokens_per_turn=tokens,
            expires_at=time.time() + lives_s,
        )
        bucket = await self.bus.bucket(KEY_BUCKET)
        await bucket.put(key_entry(RUN, secret), entry.encode())
        return secret

    async def client(self, episode: str = "e-0", attempt: int = 0, **limits: int) -> openai.AsyncOpenAI:
        key = await self.key(episode, attempt, **limits)
        client = openai.AsyncOpenAI(base_url=self.base_url(episode, attempt), api_key=key, max_retries=0, timeout=30.0)
        self._clients.append(client)
        return client

    async def close_clients(self) -> None:
        for client in self._clients:
            await client.close()

    async def turns(self, episode: str = "e-0", attempt: int = 0) -> list[TurnRecorded]:
        return [told.fact for told in await self.bus.read(TurnRecorded, RUN, episode, attempt)]

    async def turns_when(self, count: int, episode: str = "e-0", attempt: int = 0) -> list[TurnRecorded]:
        """The turns, as soon as there are so many."""
        async with asyncio.timeout(30):
            while len(turns := await self.turns(episode, attempt)) < count:
                await asyncio.sleep(0.02)
        return turns

    async def end(self, episode: str = "e-0", attempt: int = 0) -> EpisodeSealed:
        """Tell that the attempt is over, and wait for the seal."""
        await self.bus.tell(EpisodeEnded(run=RUN, episode=episode, attempt=attempt, reason=EndReason.FINISHED))
        return await self.sealed(episode, attempt)

    async def sealed(self, episode: str = "e-0", attempt: int = 0) -> EpisodeSealed:
        async with asyncio.timeout(30):
            while (told := await self.bus.find(EpisodeSealed, RUN, episode, attempt)) is None:
                await asyncio.sleep(0.02)
        return told.fact


async def started_process(proxy: ProxyAtWork, tmp_path: Path) -> asyncio.subprocess.Process:
    """A proxy with these settings in a process of its own."""
    root = Path(__file__).parents[2]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(root / room) for room in ("protos", "libs", "services", "envs")),
        "OPENFORGE_RUN": "r",
        "OPENFORGE_NATS_URL": proxy.bus.settings.url,
        "OPENFORGE_ENGINE_URL": proxy.settings.engine_url,
        "OPENFORGE_PROXY_URL": proxy.settings.proxy_url,
        "OPENFORGE_SOCKETS": proxy.settings.sockets,
        "OPENFORGE_PROXY_REPLICAS": str(proxy.settings.proxy_replicas),
        "OPENFORGE_HEALTH_FILE": str(tmp_path / "health.json"),
        "OPENFORGE_DIE_WITH_PARENT": "1",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "openforge.proxy", env=env, stderr=asyncio.subprocess.DEVNULL
    )
    async with asyncio.timeout(120):  # on a busy machine the imports alone take most of a minute
        while not (health := tmp_path / "health.json").exists() or not json.loads(health.read_text())["ready"]:
            assert process.returncode is None
            await asyncio.sleep(0.05)
    return process


@pytest.fixture
async def stub_engine() -> AsyncIterator[StubEngine]:
    engine = StubEngine()
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture
async def idle_proxy(bus: Bus, stub_engine: StubEngine, tmp_path: Path) -> AsyncIterator[ProxyAtWork]:
    """Not started yet."""
    config = run_config(byte_tokenizer_folder(tmp_path / "model"))
    await submit(bus, config)
    at_work = ProxyAtWork(bus, stub_engine.url, config, tmp_path / "s")
    yield at_work
    await at_work.close_clients()
    await at_work.stop()


@pytest.fixture
async def proxy(idle_proxy: ProxyAtWork) -> ProxyAtWork:
    await idle_proxy.start()
    return idle_proxy
