"""What the bus costs: `python -m openforge.cli.bench.bus --json`.

The wire: a trajectory of 32,768 tokens, each with its log-prob, in bytes per token, before and after zstandard, and
the time to encode and decode it (compression apart). Publishing: facts told by `Bus.tell_all`, which are encoded,
fenced by their natural key and acknowledged, against the same payloads published by bare nats-py with nothing but an
acknowledgement, with as many in flight, on the same server in turns; `publish_ratio` is the median of the repeats.
`bytes_per_token_sent` is what the bus makes of the trajectory: it compresses only what shrinks well.
"""

import argparse
import asyncio
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import nats
import zstandard
from nats.js import JetStreamContext, api

from openforge.bus import Bus, BusSettings
from openforge.bus.envelope import seal
from openforge.bus.server import NatsServer, ServerConfig, free_port
from openforge.protos import (
    EndReason,
    Fact,
    TaskRef,
    TrajectoryVerified,
    VersionSpan,
    pack_ids,
    pack_logprobs,
    unpack_ids,
    unpack_logprobs,
)
from openforge.protos import Sequence as TrainingSequence
from openforge.protos import Span as LossSpan

TOKENS = 32_768
IN_FLIGHT = 64
SYNCS = {"default": "2m", "always": "always"}
MESSAGES = {1: 3000, 64: 500, 266: 150}
"""Size in kB: how many are published for one measurement; a third of it where each is synced to disk."""


def trajectory(tokens: int, episode: int = 0) -> TrajectoryVerified:
    """All tokens are sampled, over one weight change; ids as frequent as words are."""
    draw = random.Random(episode)
    ids = [min(int(draw.paretovariate(0.7)) - 1, 49_151) for _ in range(tokens)]
    half = tokens // 2
    sequence = TrainingSequence(
        ids=pack_ids(ids),
        loss=(LossSpan(0, tokens),),
        logprobs=pack_logprobs([-draw.expovariate(2.0) for _ in range(tokens)]),
        versions=(VersionSpan(0, half, 3), VersionSpan(half, tokens - half, 4)),
        turns=(0,),
    )
    return TrajectoryVerified(
        run="bench",
        episode=f"g{episode:06}-0",
        attempt=0,
        group=f"g{episode:06}",
        purpose="train",
        task=TaskRef(env="shell", task="make-file", seed=episode),
        harness="bench",
        sequences=(sequence,),
        temperature=1.0,
        reward=1.0,
        ended=EndReason.FINISHED,
        sampled_tokens=tokens,
    )


def of_size(kilobytes: int, how_many: int) -> list[TrajectoryVerified]:
    """Facts that are so large on the wire, each with a natural key of its own."""
    overhead = len(trajectory(0).encode())
    tokens = (kilobytes * 1000 - overhead - 40) // 8
    sequence = trajectory(tokens).sequences[0]
    model = trajectory(0)
    return [
        msgspec.structs.replace(model, episode=f"g{index:06}-0", group=f"g{index:06}", sequences=(sequence,))
        for index in range(how_many)
    ]


# -- the wire


def wire() -> dict[str, float]:
    fact = trajectory(TOKENS)
    data = fact.encode()
    ids, logprobs = unpack_ids(fact.sequences[0].ids), unpack_logprobs(fact.sequences[0].logprobs)
    return {
        "bytes_per_token_raw": round(len(data) / TOKENS, 3),
        "bytes_per_token_zstd": round(len(zstandard.ZstdCompressor(level=1).compress(data)) / TOKENS, 3),
        "bytes_per_token_sent": round(len(seal(data)[0]) / TOKENS, 3),
        "encode_ms_p50": p50_ms(fact.encode),
        "decode_ms_p50": p50_ms(lambda: Fact.registry["TrajectoryVerified"].decode(data)),
        "pack_ms_p50": p50_ms(lambda: (pack_ids(ids), pack_logprobs(logprobs)), 50),
        "unpack_ms_p50": p50_ms(
            lambda: (unpack_ids(fact.sequences[0].ids), unpack_logprobs(fact.sequences[0].logprobs)), 50
        ),
        "seal_ms_p50": p50_ms(lambda: seal(data), 50),
    }


def p50_ms(work: Callable[[], Any], repeats: int = 300) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return round(statistics.median(times) * 1000, 4)


# -- publishing


async def publishing(repeats: int, share_of_messages: float) -> dict[str, Any]:
    ratios: dict[str, dict[str, float]] = {}
    rates: dict[str, dict[str, dict[str, float]]] = {}
    for sync, interval in SYNCS.items():
        share = share_of_messages / (3 if sync == "always" else 1)
        measured = await measure_server(interval, repeats, share)
        ratios[sync] = {size: round(statistics.median(f / b for f, b in pairs), 3) for size, pairs in measured.items()}
        rates[sync] = {
            size: {
                "fenced_per_s": round(statistics.median(f for f, _ in pairs)),
                "bare_per_s": round(statistics.median(b for _, b in pairs)),
                "ratio_min": round(min(f / b for f, b in pairs), 3),
                "ratio_max": round(max(f / b for f, b in pairs), 3),
            }
            for size, pairs in measured.items()
        }
    return {"publish_ratio": ratios, "publish_rates": rates}


async def measure_server(sync: str, repeats: int, share: float) -> dict[str, list[tuple[float, float]]]:
    """For each size the pairs (fenced, bare) of acknowledged messages per second."""
    with tempfile.TemporaryDirectory(prefix="bench-bus-") as folder:
        server = NatsServer(ServerConfig(folder=folder, port=free_port(), sync=sync))
        await server.start()
        bare = await nats.connect(server.url)
        try:
            async with Bus.connect(BusSettings(url=server.url), name="bench") as bus:
                await bus.set_up()
                js = bare.jetstream()
                await js.add_stream(api.StreamConfig(name="BARE", subjects=["bare"], storage=api.StorageType.FILE))
                return {
                    str(size): await measure_size(bus, js, of_size(size, max(round(messages * share), 1)), repeats)
                    for size, messages in MESSAGES.items()
                }
        finally:
            await bare.close()
            await server.stop()


async def measure_size(
    bus: Bus, js: JetStreamContext, facts: Sequence[Fact], repeats: int
) -> list[tuple[float, float]]:
    payloads = [bytes(seal(fact.encode())[0]) for fact in facts]
    pairs = []
    for repeat in range(repeats + 1):

        async def fenced() -> None:
            await bus.tell_all(facts, in_flight=IN_FLIGHT)

        async def unfenced() -> None:
            await publish_bare(js, payloads)

        order = [fenced, unfenced] if repeat % 2 else [unfenced, fenced]
        rates = {work: await rate(work, len(facts)) for work in order}
        if repeat:  # the first one warms up
            pairs.append((rates[fenced], rates[unfenced]))
        for stream in ("TRAJECTORY", "BARE"):
            await js.purge_stream(stream)
    return pairs


async def rate(work: Callable[[], Awaitable[None]], messages: int) -> float:
    began = time.perf_counter()
    await work()
    return messages / (time.perf_counter() - began)


async def publish_bare(js: JetStreamContext, payloads: Sequence[bytes]) -> None:
    """nats-py's own way to have many in flight."""
    slots = asyncio.Semaphore(IN_FLIGHT)
    futures = []
    for payload in payloads:
        await slots.acquire()
        future = await js.publish_async("bare", payload)
        future.add_done_callback(lambda _: slots.release())
        futures.append(future)
    await asyncio.gather(*futures)


# -- report


def machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "nats_py": nats.aio.client.__version__,
        "in_flight": IN_FLIGHT,
    }


def run(repeats: int = 5, share_of_messages: float = 1.0) -> dict[str, Any]:
    """The whole report. Needs nats-server, a minute or two and some 300 MB of disk meanwhile."""
    before = machine()
    published = asyncio.run(publishing(repeats, share_of_messages))
    return {**wire(), **published, "repeats": repeats, "machine": before}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="openforge bench bus", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each size and setting (default 5)")
    parser.add_argument("--share", type=float, default=1.0, help="share of the usual number of messages")
    options = parser.parse_args(arguments)
    report = msgspec.json.encode(run(options.repeats, options.share))
    print((report if options.json else msgspec.json.format(report, indent=2)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
