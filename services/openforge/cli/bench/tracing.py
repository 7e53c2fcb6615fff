"""What tracing costs the proxy: `openforge bench tracing --json`.

Three proxies run beside one another, each for a run of its own, before the stub engine and the nats-server of
`bench proxy`: without traces (`off`), with a collector and one attempt of a hundred sampled (`sampled`), and with all
of them (`all`). All three are loaded at the same time on the same processor, each with `calls` calls at sixteen at
once, so that whatever the machine does it does to all. `cpu_ms` is the CPU time of a proxy's process for a call: a
proxy is one process, so that this bounds the calls it takes in a second.

Costs are shares of `off` in the same round. A round has three new proxies, for two processes of the same program
differ by a percent or two for as long as they live. Told are the median over the rounds and, as `_from` and `_to`,
where 95 of 100 such medians lie by the order of the rounds' shares. The collector, in this process, forgets the spans
that it takes.

`not_sampled_us` is what a call of an attempt that is not sampled spends on traces, all that a proxy does for them in a
loop in this process: with a sampler that takes none, and without traces.
"""

import argparse
import asyncio
import http.server
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import msgspec
import uvloop
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

from openforge.bus import tracing
from openforge.cli.bench._proxy_load import BadAnswer
from openforge.cli.bench._proxy_text import TURNS
from openforge.cli.bench.proxy import AT_ONCE, Bench, Stage, machine, own_proxy, stage, submitted
from openforge.protos import EndReason, EpisodeEnded

_MODES: dict[str, dict[str, str]] = {
    "off": {},
    "sampled": {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"},
    "all": {"OTEL_TRACES_SAMPLER": "parentbased_always_on"},
}
_LEAST = 3  # rounds, however slow the machine
_LOOPS = 7
_OF_AN_ATTEMPT = EpisodeEnded(run="run", episode="episode", attempt=0, reason=EndReason.FINISHED)


Round = dict[str, float]
"""CPU milliseconds of a call by mode."""


class _Forget(http.server.BaseHTTPRequestHandler):
    received = 0

    def do_POST(self) -> None:
        _Forget.received += len(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Not one line a request."""


@contextmanager
def forgetful_collector() -> Iterator[str]:
    """Its address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Forget)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def rounds(options: argparse.Namespace) -> list[Round]:
    with forgetful_collector() as collector:
        async with stage(chunks=1) as on:
            for mode in _MODES:
                await submitted(on.bus, on.model, mode)
                (on.folder / mode).mkdir()
            found: list[Round] = []
            until = time.monotonic() + options.seconds
            while len(found) < options.rounds and (time.monotonic() < until or len(found) < _LEAST):
                async with proxies(on, collector) as made:
                    await loaded(made, f"warm-{len(found)}", AT_ONCE * TURNS)
                    found.append(await loaded(made, f"round-{len(found)}", options.calls))
                print(f"round {len(found)}: {_said_of(found[-1])}", file=sys.stderr)
            return found


@asynccontextmanager
async def proxies(on: Stage, collector: str) -> AsyncIterator[dict[str, Bench]]:
    """One for each mode."""
    async with AsyncExitStack() as stack:
        made = {}
        for mode, sampler in _MODES.items():
            more = sampler and {"OTEL_EXPORTER_OTLP_ENDPOINT": collector, "OTEL_METRICS_EXPORTER": "none", **sampler}
            proxy = own_proxy(on.bus, on.folder / mode, on.nats_url, on.engine_port, mode, more)
            made[mode] = await stack.enter_async_context(proxy)
            _pin(made[mode].pids)
        yield made


def _pin(pids: Sequence[int]) -> None:
    """To the first of our processors: two of them may differ by more than what is measured."""
    first = {min(os.sched_getaffinity(0))}
    for pid in pids:
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), first)


async def loaded(made: dict[str, Bench], name: str, calls: int) -> Round:
    spent = await asyncio.gather(*(proxy.loaded(name, AT_ONCE, calls) for proxy in made.values()))
    return {mode: cpu_ms for mode, (_, cpu_ms) in zip(made, spent, strict=True)}


def not_sampled_us() -> dict[str, float]:
    """CPU microseconds of a call, the least of some loops. From then on this process traces."""
    without = min(_traced_us() for _ in range(_LOOPS))
    trace.set_tracer_provider(TracerProvider(sampler=ParentBasedTraceIdRatio(0.0)))
    return {"off": round(without, 2), "sampled": round(min(_traced_us() for _ in range(_LOOPS)), 2)}


def _traced_us(calls: int = 5_000) -> float:
    began = time.process_time()
    for turn in range(calls):
        attempt = tracing.of_attempt("run", "episode", 0)
        with tracing.span("model call", attempt, run="run", attempt="episode.0", dialect="chat"):
            tracing.inject({}, _OF_AN_ATTEMPT)
            tracing.note(turn=turn, sampled_tokens=1, first_token_s=0.1)
    return (time.process_time() - began) / calls * 1e6


def _said_of(round_: Round) -> str:
    return ", ".join(f"{mode} {cpu_ms:.3f} ms" for mode, cpu_ms in round_.items())


def costs(measured: list[Round]) -> dict[str, Any]:
    """Shares of `off` that a call costs more, each with its interval."""
    found: dict[str, Any] = {
        mode: {"cpu_ms": round(statistics.median(each[mode] for each in measured), 3)} for mode in _MODES
    }
    for mode in _MODES:
        if mode != "off":
            found[mode] |= _said("cpu", [each[mode] / each["off"] - 1 for each in measured])
    return found | {"rounds": len(measured), "each": measured}


def _said(name: str, shares: list[float]) -> dict[str, float]:
    shares = sorted(shares)
    cut = max(0, math.floor(len(shares) / 2 - 0.98 * math.sqrt(len(shares))))  # of a binomial's middle, 1.96 deviations
    named = {name: statistics.median(shares), f"{name}_from": shares[cut], f"{name}_to": shares[-1 - cut]}
    return {key: round(share, 4) for key, share in named.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="openforge bench tracing", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else on stdout")
    parser.add_argument("--calls", type=int, default=640, help="calls of each mode in each round")
    parser.add_argument("--rounds", type=int, default=16, help="how often each mode is measured at most")
    parser.add_argument("--seconds", type=float, default=90, help="no round is begun after this time")
    said = parser.parse_args()
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        del os.environ[name]
    load_before = os.getloadavg()[0]
    try:
        found = costs(uvloop.run(rounds(said)))
    except BadAnswer as error:
        sys.exit(f"openforge: our own proxy failed: {error}")
    found |= {
        "not_sampled_us": not_sampled_us(),
        "calls": said.calls,
        "received_bytes": _Forget.received,
        "machine": machine(load_before),
    }
    text = msgspec.json.encode(found)
    print((text if said.json else msgspec.json.format(text, indent=2)).decode())


if __name__ == "__main__":
    main()
