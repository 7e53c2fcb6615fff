"""What the proxy adds to a model call: `python -m openforge.cli.bench.proxy --json`.

A conversation grows around 8,000 tokens; each answer has 200 sampled tokens with their log-probs. `direct` asks
a stub engine for it over its wire, `proxy` asks the proxy in front of the same stub, as a process of its own with
a real nats-server behind it. Load, stub, proxy and nats-server share this machine.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from openforge.bus import Bus, BusSettings
from openforge.bus.server import NatsServer, ServerConfig, free_port
from openforge.bus.streams import stream_of
from openforge.protos import KEY_BUCKET, AttemptKey, key_entry
from openforge.runs import config_of, submit
from openforge.service import read_health

RUN = "bench"
PROMPT_TOKENS = 8_000
SAMPLED_TOKENS = 200
TURNS_AN_ATTEMPT = 10
_STOP_ID = 2

Ask = Callable[[int, int], Awaitable[None]]
"""Makes one call: of which worker, and its how manieth."""


class StubEngine:
    """Answers at once: 200 tokens in `chunks` pieces."""

    def __init__(self, chunks: int) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        tokens = [40 + index % 50 for index in range(SAMPLED_TOKENS - 1)] + [_STOP_ID]
        size = -(-SAMPLED_TOKENS // chunks)
        pieces = [tokens[start : start + size] for start in range(0, SAMPLED_TOKENS, size)]
        self._rest = b"".join(_chunk(piece, piece is pieces[-1]) for piece in pieces) + b"data: [DONE]\n\n"

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        start = body.index(b'"token_ids":[') + len(b'"token_ids":')
        prompt = body[start : body.index(b"]", start) + 1]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices":[],"prompt_token_ids":' + prompt + b"}\n\n" + self._rest)
        return response

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/inference/v1/generate", self.answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", int(self.url.rsplit(":", 1)[1])).start()
        yield
        await runner.cleanup()


def _chunk(tokens: list[int], last: bool) -> bytes:
    choice: dict[str, Any] = {
        "index": 0,
        "token_ids": tokens,
        "logprobs": {"content": [{"token_id": token, "logprob": -0.5123, "rank": 1} for token in tokens]},
        "finish_reason": "stop" if last else None,
    }
    if last:
        choice["weight_versions"] = [{"version": "0", "start": 0, "end": SAMPLED_TOKENS}]
    return b"data: " + msgspec.json.encode({"choices": [choice]}) + b"\n\n"


def model_folder(path: Path) -> Path:
    """One byte, one token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    vocabulary = {token: index for index, token in enumerate([*special, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@asynccontextmanager
async def proxy_process(folder: Path, nats_url: str, engine_url: str) -> AsyncIterator[tuple[str, int]]:
    """Its URL and its process id."""
    url, health = f"http://127.0.0.1:{free_port()}", folder / "health.json"
    env = os.environ | {
        "OPENFORGE_RUN": RUN,
        "OPENFORGE_NATS_URL": nats_url,
        "OPENFORGE_ENGINE_URL": engine_url,
        "OPENFORGE_PROXY_URL": url,
        "OPENFORGE_HEALTH_FILE": str(health),
        "OPENFORGE_DIE_WITH_PARENT": "1",
        "OPENFORGE_LOG_LEVEL": "warning",
    }
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "openforge.proxy", env=env)
    try:
        while not ((state := read_health(health)) and state.ready):
            if process.returncode is not None:
                raise SystemExit("the proxy ended at once: its last line says why")
            await asyncio.sleep(0.05)
        yield url, process.pid
    finally:
        process.terminate()
        await process.wait()


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(ask: Ask, concurrency: int, calls: int) -> dict[str, float]:
    """Milliseconds of a call, and calls a second."""
    spent_s: list[float] = []

    async def worker(number: int) -> None:
        for index in range(calls // concurrency):
            begin = time.perf_counter()
            await ask(number, index)
            spent_s.append(time.perf_counter() - begin)

    begin = time.perf_counter()
    await asyncio.gather(*(worker(number) for number in range(concurrency)))
    wall_s = time.perf_counter() - begin
    percentiles = statistics.quantiles(spent_s, n=100)
    return {
        "p50_ms": round(percentiles[49] * 1e3, 3),
        "p99_ms": round(percentiles[98] * 1e3, 3),
        "calls_per_s": round(len(spent_s) / wall_s, 1),
    }


def direct(session: aiohttp.ClientSession, engine_url: str) -> Ask:
    body = msgspec.json.encode(
        {
            "model": "policy",
            "token_ids": [40 + index % 50 for index in range(PROMPT_TOKENS)],
            "sampling_params": {"max_tokens": SAMPLED_TOKENS, "logprobs": 0},
            "return_token_ids": True,
            "stream": True,
        }
    )

    async def ask(worker: int, index: int) -> None:
        async with session.post(f"{engine_url}/inference/v1/generate", data=body) as response:
            await response.read()

    return ask


class Talk:
    """One conversation after the other, each of ten turns around 8,000 tokens."""

    def __init__(self, session: aiohttp.ClientSession, url: str, bus: Bus, phase: str, stream: bool) -> None:
        self._session = session
        self._url = url
        self._bus = bus
        self._phase = phase
        self._stream = stream
        self._messages: dict[int, list[dict[str, Any]]] = {}

    async def keys(self, concurrency: int, calls: int) -> None:
        bucket = await self._bus.bucket(KEY_BUCKET)
        for worker in range(concurrency):
            for number in range(calls // concurrency // TURNS_AN_ATTEMPT + 1):
                episode = self._episode(worker, number)
                entry = AttemptKey(
                    run=RUN, episode=episode, attempt=0, turns=99, tokens_per_turn=999, expires_at=time.time() + 9999
                )
                await bucket.put(key_entry(RUN, f"of-{episode}"), entry.encode())

    def _episode(self, worker: int, number: int) -> str:
        return f"{self._phase}-{worker}-{number}"

    async def ask(self, worker: int, index: int) -> None:
        number, turn = divmod(index, TURNS_AN_ATTEMPT)
        if turn == 0:
            system = "Work carefully. " * ((PROMPT_TOKENS - 1000) // 16)
            self._messages[worker] = [{"role": "system", "content": system}, {"role": "user", "content": "Begin."}]
        episode, messages = self._episode(worker, number), self._messages[worker]
        async with self._session.post(
            f"{self._url}/ep/{episode}.0/v1/chat/completions",
            data=msgspec.json.encode({"model": "m", "messages": messages, "stream": self._stream}),
            headers={"Authorization": f"Bearer of-{episode}"},
        ) as response:
            body = await response.read()
        if response.status != 200:
            raise SystemExit(f"the proxy answered {response.status}: {body[:300]!r}")
        messages += [{"role": "assistant", "content": self._content(body)}, {"role": "user", "content": "Go on. " * 8}]

    def _content(self, body: bytes) -> str:
        if not self._stream:
            return str(msgspec.json.decode(body)["choices"][0]["message"]["content"])
        events = [event[6:] for event in body.split(b"\n\n") if event.startswith(b"data: {")]
        deltas = [msgspec.json.decode(event)["choices"][0]["delta"] for event in events]
        return "".join(delta.get("content", "") for delta in deltas)


async def bench(calls: int, chunks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="of-bench-") as name:
        folder = Path(name)
        server = NatsServer(ServerConfig(folder=str(folder / "nats"), port=free_port()))
        await server.start()
        try:
            async with Bus.connect(BusSettings(url=server.url), name="bench") as bus:
                await bus.set_up()
                await _submit(bus, model_folder(folder / "model"))
                return await _bench(bus, folder, server.url, calls, chunks)
        finally:
            await server.stop()


async def _submit(bus: Bus, model: Path) -> None:
    said = {
        "run": {"name": RUN, "steps": 1},
        "model": {"path": str(model), "context": 4 * PROMPT_TOKENS},
        "sampling": {"max_tokens": 2 * SAMPLED_TOKENS},
        "environment": {"name": "shell", "harness": "mini"},
    }
    await submit(bus, config_of(msgspec.json.encode(said).decode()))


async def _bench(bus: Bus, folder: Path, nats_url: str, calls: int, chunks: int) -> dict[str, Any]:
    engine = StubEngine(chunks)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        engine.serving(),
        proxy_process(folder, nats_url, engine.url) as (url, pid),
        aiohttp.ClientSession(connector=connector) as session,
    ):
        result: dict[str, Any] = {
            "prompt_tokens": PROMPT_TOKENS,
            "sampled_tokens": SAMPLED_TOKENS,
            "engine_chunks": chunks,
            "calls": calls,
        }
        for concurrency in (1, 16):
            ask = direct(session, engine.url)
            await measure(ask, concurrency, calls // 4)
            straight = await measure(ask, concurrency, calls)
            for stream in (False, True):
                phase = f"c{concurrency}{'s' if stream else ''}"
                talk = Talk(session, url, bus, phase, stream)
                await talk.keys(concurrency, calls)
                used_s = cpu_s(pid)
                through = await measure(talk.ask, concurrency, calls)
                used_s = cpu_s(pid) - used_s
                result[phase] = {
                    "direct": straight,
                    "proxy": through,
                    "proxy_cpu_ms": round(used_s * 1e3 / calls, 3),
                    "added_p50_ms": round(through["p50_ms"] - straight["p50_ms"], 3),
                    "added_p99_ms": round(through["p99_ms"] - straight["p99_ms"], 3),
                }
        stored = await bus.link.js.stream_info(stream_of("turn"))
        result["bytes_per_turn"] = round(stored.state.bytes / stored.state.messages, 1)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else on stdout")
    parser.add_argument("--calls", type=int, default=800, help="calls of each measurement")
    parser.add_argument("--chunks", type=int, default=1, help="pieces in which the engine sends an answer")
    options = parser.parse_args()
    result = asyncio.run(bench(options.calls, options.chunks))
    text = msgspec.json.encode(result)
    print((text if options.json else msgspec.json.format(text, indent=2)).decode())


if __name__ == "__main__":
    main()
