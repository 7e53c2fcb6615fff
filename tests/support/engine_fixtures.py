"""The embedded engine behind real HTTP on loopback."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import torch

from openforge.bus.server import free_port
from openforge.engine.embedded import EngineOptions
from openforge.engine.in_process import InProcessBackend
from openforge.weights import Probe, Written, write_weights


class ServedEngine:
    """A running engine, a client for it, and the backend behind it."""

    def __init__(self, backend: InProcessBackend, client: httpx.AsyncClient, url: str) -> None:
        self.backend = backend
        self.client = client
        self.url = url

    async def generate(self, token_ids: list[int], **more: object) -> httpx.Response:
        params = more.pop("sampling_params", {})
        assert isinstance(params, Mapping)
        body = {"model": "policy", "token_ids": token_ids, "sampling_params": {"max_tokens": 8, **params}, **more}
        return await self.client.post("/inference/v1/generate", json=body)

    async def running(self) -> tuple[int, int]:
        """How many requests run, and wait."""
        text = (await self.client.get("/metrics")).text
        numbers = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        name = '{model_name="policy"}'
        return int(numbers[f"vllm:num_requests_running{name}"]), int(numbers[f"vllm:num_requests_waiting{name}"])


@asynccontextmanager
async def engine_over_http(folder: Path | None, **options: object) -> AsyncIterator[ServedEngine]:
    """In float32 unless the options say otherwise; without `folder` nothing is served yet."""
    url = f"http://127.0.0.1:{free_port()}"
    backend = InProcessBackend(url, EngineOptions(**({"dtype": "float32"} | options)))  # type: ignore[arg-type]
    await backend.start()
    try:
        if folder is not None:
            await backend.apply(folder, "", 0)
        async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:
            yield ServedEngine(backend, client, url)
    finally:
        await backend.stop()


def publish(root: Path, model: Path, version: int, *, incarnation: int = 0, probe: Probe | None = None) -> Written:
    """A weights folder as a learner writes it, with the weights of a model folder."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = load_file(model / "model.safetensors")
    return write_weights(
        root,
        tensors,
        config_dir=model,
        version=version,
        incarnation=incarnation,
        probe=probe or probe_of(model),
        dtype="float32",
    )


def probe_of(model: Path) -> Probe:
    """Computed by the reference implementation."""
    from reference_model import reference_logprobs

    prompt, answer = (1, 40, 41, 42), (50, 60, 2)
    return Probe(prompt_ids=prompt, token_ids=answer, logprobs=tuple(reference_logprobs(model, prompt, answer)))
