"""How long new weights take to be sampled from: `python -m openforge.cli.bench.weights --json`.

A real engine service on a real bus serves the model to a few clients that never pause. New weights are written as a
learner writes them, and then announced; the clock runs from the announcement to the arrival, at any client, of the
first token that was sampled under them (its answer says at its end which tokens were). `announce_to_every_client_s` is
when each of the clients has had one. `copy_s` is the part in which the files are read and hashed, `load_s` the part in
which they are brought into the running model (with vLLM requests are paused meanwhile), `probe_s` the log-prob probe,
which waits beside the clients' tokens; medians of the repeats. `write_s` lies before the announcement. With
`--lora-rank` what is announced are adapters of that rank on all linear layers.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from openforge.bus import Bus, BusSettings
from openforge.bus.server import NatsServer, ServerConfig, free_port
from openforge.cli.bench.engine import machine
from openforge.models import get, resolve
from openforge.protos import PolicyPublished, PolicyServed
from openforge.runs import RunConfig, submit
from openforge.runs.config import (
    EngineSection,
    EnvironmentSection,
    LearnerSection,
    LoraSection,
    ModelSection,
    RunSection,
)
from openforge.service import ends_with_us
from openforge.weights import Written, keep_newest, write_weights
from openforge.wire.generate import GenerateRequest, GenerateResponse, SamplingParams

PROMPT_TOKENS, ANSWER_TOKENS, CONTEXT = 64, 64, 512
START_S, UPDATE_S = 600.0, 300.0
VLLM_ARGS = ("--enforce-eager",)


class Update(msgspec.Struct, frozen=True):
    """One announcement, in seconds."""

    announce_to_first_token_s: float
    announce_to_every_client_s: float
    copy_s: float
    load_s: float
    probe_s: float
    write_s: float


class Weights:
    """The model's own weights in the dtype that is served, a little changed for each version."""

    def __init__(self, model: Path, dtype: str) -> None:
        import torch
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        torch.set_num_threads(1)
        self._folder, self._dtype = model, dtype
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._tensors = load_file(model / "model.safetensors")

    def write(self, root: Path, version: int) -> Written:
        from openforge.learner.probe import probe

        tensors = {name: tensor.float() * (1 + 1e-3 * version) for name, tensor in self._tensors.items()}
        return write_weights(
            root,
            tensors,
            config_dir=self._folder,
            version=version,
            incarnation=0,
            probe=probe(self._model, tensors, self._dtype),
            dtype=self._dtype,  # type: ignore[arg-type]
        )


class Adapters:
    """Adapters on the model's own weights, drawn anew for each version, in the place of a backend that trains them."""

    def __init__(self, model: Path, config: RunConfig, root: Path) -> None:
        import torch

        from openforge.learner.adapters import AdapterFolders
        from openforge.learner.backends import lora
        from openforge.learner.backends.loading import load_plain

        torch.set_num_threads(1)
        self._plain, adapted = load_plain(str(model)), load_plain(str(model))
        lora.equip(adapted, config.learner.lora)
        self._adapters = lora.alone(dict(adapted.named_parameters()))
        self._folders = AdapterFolders(self, config, root)

    def adapters(self) -> dict[str, Any]:
        return self._adapters

    def plain_model(self) -> Any:
        return self._plain

    def write(self, root: Path, version: int) -> Written:
        for name, tensor in self._adapters.items():
            if "lora_B" in name:
                tensor.normal_(std=1e-3)
        return self._folders.write(version, 0, "")


@asynccontextmanager
async def bus_of_its_own(folder: Path) -> AsyncIterator[tuple[Bus, str]]:
    server = NatsServer(ServerConfig(folder=str(folder / "nats"), port=free_port()))
    await server.start()
    try:
        async with Bus.connect(BusSettings(url=server.url), name="bench") as bus:
            await bus.set_up()
            yield bus, server.url
    finally:
        await server.stop()


@asynccontextmanager
async def engine_service(run: str, nats_url: str, url: str, log: Path) -> AsyncIterator[None]:
    env = os.environ | {
        "OPENFORGE_RUN": run,
        "OPENFORGE_NATS_URL": nats_url,
        "OPENFORGE_ENGINE_URL": url,
    }
    with log.open("wb") as said:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "openforge.engine"), env=env, stdout=said, stderr=said, preexec_fn=ends_with_us()
        )
        try:
            yield
        finally:
            process.terminate()
            await process.wait()


class Client:
    """Asks the engine without pause. `began` says of each version when its first token arrived."""

    def __init__(self, http: httpx.AsyncClient, vocabulary: int) -> None:
        self.began: dict[str, float] = {}
        self._http = http
        self._asked = GenerateRequest(
            model="policy",
            token_ids=[7 + 31 * index % (vocabulary - 7) for index in range(PROMPT_TOKENS)],
            sampling_params=SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True),
            stream=True,
        )

    async def ask_on(self) -> None:
        while True:
            try:
                await self._ask()
            except httpx.HTTPError:
                await asyncio.sleep(0.1)  # nothing listens before the first weights

    async def _ask(self) -> None:
        arrived: list[float] = []
        async with self._http.stream("POST", "/inference/v1/generate", json=msgspec.to_builtins(self._asked)) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in msgspec.json.decode(line[6:], type=GenerateResponse).choices:
                    arrived += [time.monotonic()] * len(choice.token_ids)
                    for span in choice.weight_versions or ():
                        self.began.setdefault(span.version, arrived[span.start])

    async def until(self, version: int, within_s: float) -> float:
        """When the first token of `version` arrived; told when its answer has ended."""
        async with asyncio.timeout(within_s):
            while str(version) not in self.began:
                await asyncio.sleep(0.02)
        return self.began[str(version)]


async def measure(kind: str, options: argparse.Namespace, model: Path, folder: Path) -> list[Update]:
    """The first version starts the engine and is not counted."""
    run, url = f"bench-{kind}", f"http://127.0.0.1:{free_port()}"
    config = config_of(kind, run, options, model)
    weights = await asyncio.to_thread(_writer, model, config, folder / "weights")
    vocabulary = msgspec.json.decode((model / "config.json").read_bytes())["vocab_size"]
    async with bus_of_its_own(folder) as (bus, nats_url):
        await submit(bus, config)
        async with (
            engine_service(run, nats_url, url, folder / "engine.log"),
            httpx.AsyncClient(base_url=url, timeout=UPDATE_S) as http,
        ):
            await announce(bus, run, weights.write(folder / "weights", 0))
            clients = [Client(http, vocabulary) for _ in range(options.clients)]
            loads = [asyncio.create_task(client.ask_on()) for client in clients]
            try:
                await asyncio.gather(*(client.until(0, START_S) for client in clients))
                return [
                    await update(bus, run, clients, weights, folder, version)
                    for version in range(1, options.repeats + 1)
                ]
            finally:
                for load in loads:
                    load.cancel()
                await asyncio.gather(*loads, return_exceptions=True)


def _writer(model: Path, config: RunConfig, root: Path) -> Weights | Adapters:
    return Adapters(model, config, root) if config.learner.lora.rank else Weights(model, config.engine.dtype)


async def update(
    bus: Bus, run: str, clients: list[Client], weights: Weights | Adapters, folder: Path, version: int
) -> Update:
    began = time.monotonic()
    written = await asyncio.to_thread(weights.write, folder / "weights", version)
    announced = time.monotonic()
    await announce(bus, run, written)
    arrived = await asyncio.gather(*(client.until(version, UPDATE_S) for client in clients))
    served = await served_fact(bus, run, version)
    await asyncio.to_thread(keep_newest, folder / "weights", 2)
    return Update(
        announce_to_first_token_s=min(arrived) - announced,
        announce_to_every_client_s=max(arrived) - announced,
        copy_s=served.check_s,
        load_s=served.carry_s,
        probe_s=served.probe_s,
        write_s=announced - began,
    )


async def announce(bus: Bus, run: str, written: Written) -> None:
    version = int(written.path.name[1:].partition("-")[0])
    await bus.tell(
        PolicyPublished(
            run=run,
            version=version,
            incarnation=0,
            location=str(written.path),
            digest=written.digest,
            bytes=written.bytes,
        )
    )


async def served_fact(bus: Bus, run: str, version: int) -> PolicyServed:
    """Told after the probe, so a little later than the first token."""
    async with asyncio.timeout(UPDATE_S):
        while not (tolds := await bus.read(PolicyServed, run, version, 0)):
            await asyncio.sleep(0.05)
    return tolds[0].fact


def config_of(kind: str, run: str, options: argparse.Namespace, model: Path) -> RunConfig:
    return RunConfig(
        run=RunSection(name=run, steps=1),
        model=ModelSection(path=str(model), context=CONTEXT),
        engine=EngineSection(
            kind=kind,  # type: ignore[arg-type]
            dtype=options.dtype,
            threads=options.threads,
            max_requests=options.clients + 2,
            vllm_args=VLLM_ARGS if kind == "vllm" else (),
        ),
        environment=EnvironmentSection(name="letters", harness="letters"),
        learner=LearnerSection(lora=LoraSection(rank=options.lora_rank)),
    )


def summary(updates: list[Update]) -> dict[str, float]:
    fields = {name: [getattr(one, name) for one in updates] for name in Update.__struct_fields__}
    medians = {name: statistics.median(values) for name, values in fields.items()}
    slowest = max(fields["announce_to_first_token_s"])
    first_token = medians.pop("announce_to_first_token_s")
    named = {"announce_to_first_token_s_p50": first_token, "announce_to_first_token_s_max": slowest} | medians
    return {name: round(value, 4) for name, value in named.items()}


def run(options: argparse.Namespace, model: Path) -> dict[str, Any]:
    before = machine()
    return {
        "model": options.model,
        "dtype": options.dtype,
        "lora_rank": options.lora_rank,
        "clients": options.clients,
        "repeats": options.repeats,
        "engines": dict(_by_engine(options, model)),
        "machine": before | {"load_1m_after": round(os.getloadavg()[0], 2)},
    }


def _by_engine(options: argparse.Namespace, model: Path) -> Iterator[tuple[str, dict[str, float]]]:
    for kind in options.engines:
        with tempfile.TemporaryDirectory(prefix="openforge-bench-") as folder:
            yield kind, summary(asyncio.run(measure(kind, options, model, Path(folder))))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="openforge bench weights", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--model", default="builtin:smollm2-135m", help="what a run file's model.path may be")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--engines", choices=("embedded", "vllm"), nargs="+", default=["embedded", "vllm"])
    parser.add_argument("--lora-rank", type=int, default=0, help="announce adapters instead of whole weights")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(arguments)
    if options.model.startswith("builtin:"):
        get(options.model.removeprefix("builtin:"))
    report = msgspec.json.encode(run(options, Path(resolve(options.model)).absolute()))
    print((report if options.json else msgspec.json.format(report, indent=2)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
