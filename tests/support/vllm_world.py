"""A driver with a real vLLM server on the CPU, and the model folders behind the versions that it serves."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import httpx
import msgspec
from reference_model import reference_logprobs

from openforge.bus.server import free_port
from openforge.engine.settings import Settings
from openforge.engine.vllm import VllmBackend
from openforge.runs import RunConfig
from openforge.runs.config import EngineSection, EnvironmentSection, ModelSection, RunSection
from openforge.weights import Written
from openforge.wire.generate import GenerateRequest, GenerateResponse, SamplingParams

NEAR = 1e-3
PROMPT = [1, *range(2000, 2300)]
"""Longer than a cache block, so that a stale prefix would show."""


class Server:
    """A server, and the model folders behind its versions."""

    def __init__(self, client: httpx.AsyncClient, models: list[Path]) -> None:
        self.client, self.models = client, models

    async def generate(self, ids: list[int], request_id: str = "", **params: object) -> GenerateResponse:
        asked = GenerateRequest(
            model="policy",
            token_ids=ids,
            request_id=request_id,
            sampling_params=SamplingParams(**({"max_tokens": 16, "seed": 1} | params)),  # type: ignore[arg-type]
        )
        answer = await self.client.post("/inference/v1/generate", json=msgspec.to_builtins(asked))
        assert answer.status_code == 200, answer.text
        return msgspec.json.decode(answer.content, type=GenerateResponse)

    async def running(self) -> int:
        text = (await self.client.get("/metrics")).text
        (line,) = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
        return int(float(line.rsplit(" ", 1)[1]))

    async def until_running(self, wanted: int) -> None:
        async with asyncio.timeout(60):
            while await self.running() != wanted:
                await asyncio.sleep(0.05)

    async def version(self) -> str:
        return str((await self.client.get("/weight_info")).json()["weight_version"])

    def truth(self, version: int, ids: list[int], answer: list[int]) -> list[float]:
        return reference_logprobs(self.models[version], ids, answer)


class Served(Server):
    """A server and the driver that started it."""

    def __init__(self, driver: VllmBackend, client: httpx.AsyncClient, root: Path, models: list[Path]) -> None:
        super().__init__(client, models)
        self.driver, self.root = driver, root


@asynccontextmanager
async def vllm_serving(
    first: Written, root: Path, models: list[Path], weight_path: Literal["disk", "gloo"] = "disk"
) -> AsyncIterator[Served]:
    """In float32, until the block ends. `models` are those of the versions; `first` is version 0."""
    settings = Settings(
        run="r",
        engine_url=f"http://127.0.0.1:{free_port()}",
        weight_call_timeout_s=120.0,
        vllm_python=os.environ.get("OPENFORGE_VLLM_PYTHON", ""),
    )
    config = RunConfig(
        run=RunSection(name="r", steps=1),
        model=ModelSection(path=str(models[0]), context=1024),
        engine=EngineSection(
            kind="vllm", dtype="float32", max_requests=16, vllm_args=("--enforce-eager",), weight_path=weight_path
        ),
        environment=EnvironmentSection(name="letters", harness="letters"),
    )
    driver = VllmBackend(settings, config)
    await driver.start()
    try:
        await driver.apply(first.path, first.digest, 0)
        async with httpx.AsyncClient(base_url=settings.engine_url, timeout=300.0) as client:
            yield Served(driver, client, root, models)
    finally:
        await driver.stop()


def stated(answer: GenerateResponse) -> list[float]:
    """The log-probs of the sampled tokens."""
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    return [entry.logprob for entry in logprobs.content]


def spans(answer: GenerateResponse) -> list[tuple[str, int, int]]:
    """Version, first and end of each stretch of tokens."""
    return [(span.version, span.start, span.end) for span in answer.choices[0].weight_versions or []]
