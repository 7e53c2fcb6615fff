"""How fast the embedded engine is: `python -m openforge.cli.bench.engine --json`.

Groups of 8 requests share a task of 20 tokens after an instruction of 240 tokens that all share, as episodes of one
run do; each samples 48 tokens, over HTTP. The instruction is known to the engine, the tasks are new in each repeat. In
turns with it, transformers' `generate` answers 32 such prompts. Tokens per second are sampled tokens, prompts included
in the time: by wall clock, and per second of the server's own processor time, which says more on a busy machine.
"""

import argparse
import asyncio
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import httpx
import msgspec

from openforge.bus.server import free_port
from openforge.models import get, resolve
from openforge.service import ends_with_us

INSTRUCTION_TOKENS, TASK_TOKENS, NEW_TOKENS = 240, 20, 48
GROUP = 8
TEMPERATURE = 0.7
PEER_REQUESTS = 32
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Sampled(msgspec.Struct, frozen=True):
    """One measurement."""

    tokens: int
    wall_s: float
    cpu_s: float


def prompts(requests: int, vocabulary: int, seed: str) -> list[list[int]]:
    def ids(draw: random.Random, count: int) -> list[int]:
        return [draw.randrange(3, vocabulary) for _ in range(count)]

    draw = random.Random(seed)
    instruction = ids(random.Random("instruction"), INSTRUCTION_TOKENS)
    tasks = [ids(draw, TASK_TOKENS) for _ in range((requests + GROUP - 1) // GROUP)]
    return [instruction + tasks[request // GROUP] for request in range(requests)]


class Engine:
    """The engine as a process of its own."""

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "openforge.engine.standalone", "--model", model, "--url", self.url]
        self._process = _start([*command, "--dtype", dtype, "--threads", str(threads)])
        self.said = msgspec.json.decode(_line(self._process), type=dict[str, Any])

    def measure(self, wanted: list[list[int]]) -> Sampled:
        began, used = time.perf_counter(), _cpu_s(self._process.pid)
        tokens = asyncio.run(_sample_all(self.url, wanted))
        return Sampled(tokens, time.perf_counter() - began, _cpu_s(self._process.pid) - used)

    def close(self) -> None:
        _end(self._process)


class Peer:
    """transformers' `generate` as a process of its own."""

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        command = [sys.executable, "-m", "openforge.engine.peer", "--model", model, "--dtype", dtype]
        options = ["--threads", str(threads), "--new-tokens", str(NEW_TOKENS), "--temperature", str(TEMPERATURE)]
        self._process = _start([*command, *options])

    def measure(self, wanted: list[list[int]]) -> Sampled:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(wanted) + b"\n")
        self._process.stdin.flush()
        return msgspec.json.decode(_line(self._process), type=Sampled)

    def close(self) -> None:
        _end(self._process)


async def _sample_all(url: str, wanted: list[list[int]]) -> int:
    limits = httpx.Limits(max_connections=len(wanted))
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        return sum(await asyncio.gather(*(_sample(client, ids) for ids in wanted)))


async def _sample(client: httpx.AsyncClient, ids: list[int]) -> int:
    params = {"max_tokens": NEW_TOKENS, "temperature": TEMPERATURE, "ignore_eos": True}
    body = {"model": "policy", "token_ids": ids, "sampling_params": params}
    answer = await client.post("/inference/v1/generate", json=body)
    answer.raise_for_status()
    return len(answer.json()["choices"][0]["token_ids"])


def measure_threads(
    model: str, dtype: str, threads: int, requests: list[int], repeats: int
) -> tuple[dict[str, list[Sampled]], str]:
    """All measurements with so many threads, the peer's too, in turns; and the dtype that was computed in."""
    with ExitStack() as stack:
        engine = Engine(model, dtype, threads)
        stack.callback(engine.close)
        computes_in = str(engine.said["computes_in"])
        peer = Peer(model, computes_in, threads)
        stack.callback(peer.close)
        measured: dict[str, list[Sampled]] = {name: [] for name in (*map(str, requests), "peer")}
        vocabulary = msgspec.json.decode(Path(model, "config.json").read_bytes())["vocab_size"]
        engine.measure(prompts(1, vocabulary, "warm"))
        for repeat in range(repeats):
            for count in requests:
                measured[str(count)].append(engine.measure(prompts(count, vocabulary, f"{repeat}/{count}")))
            measured["peer"].append(peer.measure(prompts(PEER_REQUESTS, vocabulary, f"{repeat}")))
        return measured, computes_in


def summary(sampled: list[Sampled]) -> dict[str, float]:
    rates = [one.tokens / one.wall_s for one in sampled]
    return {
        "tokens_per_s": round(statistics.median(rates), 1),
        "tokens_per_s_min": round(min(rates), 1),
        "tokens_per_s_max": round(max(rates), 1),
        "tokens_per_cpu_s": round(statistics.median(one.tokens / max(one.cpu_s, 1e-9) for one in sampled), 1),
    }


def run(model: str, dtype: str, threads: list[int], requests: list[int], repeats: int) -> dict[str, Any]:
    before = machine()
    by_threads: dict[str, Any] = {}
    computes_in = ""
    for count in threads:
        measured, computes_in = measure_threads(model, dtype, count, requests, repeats)
        rows = {name: summary(sampled) for name, sampled in measured.items()}
        by_threads[str(count)] = {"peer_transformers_32": rows.pop("peer"), "requests": rows}
    return {
        "model": model,
        "dtype": dtype,
        "computes_in": computes_in,
        "prompt_tokens": INSTRUCTION_TOKENS + TASK_TOKENS,
        "new_tokens": NEW_TOKENS,
        "threads": by_threads,
        "repeats": repeats,
        "machine": before | {"load_1m_after": round(os.getloadavg()[0], 2)},
    }


def machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }


def _start(command: list[str]) -> "subprocess.Popen[bytes]":
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, preexec_fn=ends_with_us())


def _line(process: "subprocess.Popen[bytes]") -> bytes:
    stdout: IO[bytes] | None = process.stdout
    assert stdout is not None
    line = stdout.readline()
    if not line:
        raise RuntimeError(f"{' '.join(map(str, process.args))} ended with code {process.wait()} and said nothing")  # type: ignore[arg-type]
    return line


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    process.communicate()


def _cpu_s(pid: int) -> float:
    """Processor seconds that a process has used so far. Linux; elsewhere 0."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="openforge bench engine", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--model", default="builtin:smollm2-135m", help="what a run file's model.path may be")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    if options.model.startswith("builtin:"):
        get(options.model.removeprefix("builtin:"))
    model = str(resolve(options.model))
    report = msgspec.json.encode(run(model, options.dtype, options.threads, options.requests, options.repeats))
    print((report if options.json else msgspec.json.format(report, indent=2)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
