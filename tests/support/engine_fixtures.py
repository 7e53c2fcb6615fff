"""The embedded engine behind real HTTP on loopback."""

import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import torch

from openforge.bus.server import free_port
from openforge.engine.embedded import EngineOptions
from openforge.engine.in_process import InProcessBackend
from openforge.weights import BASE, Manifest, Probe, Written, folder_name, write_folder, write_model, write_weights
from openforge.weights.manifest import digest_of, manifest_bytes


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


def publish_adapters(
    root: Path,
    model: Path,
    version: int,
    whole: Path,
    targets: str | tuple[str, ...] = ("q_proj", "v_proj", "down_proj"),
) -> Written:
    """A folder of adapters, drawn anew for each version, in files that peft writes, and the weights below them; `whole`
    becomes a model folder with what peft itself makes of both."""
    from peft import LoraConfig, get_peft_model
    from reference_model import reference_logprobs
    from transformers import AutoModelForCausalLM

    torch.manual_seed(version)
    config = LoraConfig(
        r=4,
        lora_alpha=8.0,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    files = whole.with_name(f"{whole.name}-files")
    adapted.save_pretrained(files)
    adapted.merge_and_unload().save_pretrained(whole)
    for file in model.glob("*.json"):
        shutil.copyfile(file, whole / file.name)
    prompt, answer = (1, 40, 41, 42), (50, 60, 2)
    stated = Manifest(
        version=version,
        incarnation=0,
        dtype="float32",
        files={},
        tensors={},
        probe=Probe(prompt_ids=prompt, token_ids=answer, logprobs=tuple(reference_logprobs(whole, prompt, answer))),
        base=_base(root, model),
    )
    return write_folder(root / folder_name(version, 0), stated, lambda draft: _copy(files, draft))


def _base(root: Path, model: Path) -> str:
    """The digest of the weights below the adapters, written once."""
    from safetensors.torch import load_file

    if not (root / BASE).exists():
        stated = Manifest(version=0, incarnation=0, dtype="float32", files={}, tensors={})
        tensors: dict[str, torch.Tensor] = load_file(model / "model.safetensors")
        write_folder(root / BASE, stated, partial(write_model, tensors=tensors, config_dir=model, dtype="float32"))
    return digest_of(manifest_bytes(root / BASE))


def _copy(files: Path, draft: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copyfile(files / name, draft / name)
