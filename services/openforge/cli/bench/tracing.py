"""What tracing costs the proxy: `openforge bench tracing --json`.

Three proxies run beside one another, each for a run of its own, before the stub engine and the nats-server of
`bench proxy`: without traces (`off`), with a collector and one attempt of a hundred sampled (`sampled`), and with all
of them (`all`). They are loaded in turns, `calls` calls at sixteen at once, in an order that changes with each round,
so that all see the same machine; the one under load is measured, the others idle. `cpu_ms` is the CPU time of the
proxy's process for a call and hardly depends on what else the machine does, `calls_per_s` is the rate.

Costs are shares of `off` in the same round: the median over the rounds and, as `_from` and `_to`, where 95 of 100 such
medians lie by the order of the rounds' shares. The collector, in this process, forgets the spans that it takes.
"""

import argparse
import http.server
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import msgspec
import uvloop

from openforge.cli.bench._proxy_load import BadAnswer
from openforge.cli.bench.proxy import AT_ONCE, Bench, machine, own_proxy, stage, submitted

_MODES: dict[str, dict[str, str]] = {
    "off": {},
    "sampled": {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"},
    "all": {"OTEL_TRACES_SAMPLER": "parentbased_always_on"},
}
_LEAST = 3  # rounds, however slow the machine


class Spent(msgspec.Struct, frozen=True):
    """One mode in one round."""

    cpu_ms: float
    calls_per_s: float


Round = dict[str, Spent]


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


@asynccontextmanager
async def proxies(collector: str) -> AsyncIterator[dict[str, Bench]]:
    """One for each mode."""
    async with stage(chunks=1) as on, AsyncExitStack() as stack:
        made = {}
        for mode, sampler in _MODES.items():
            await submitted(on.bus, on.model, mode)
            more = sampler and {"OTEL_EXPORTER_OTLP_ENDPOINT": collector, "OTEL_METRICS_EXPORTER": "none", **sampler}
            (on.folder / mode).mkdir()
            proxy = own_proxy(on.bus, on.folder / mode, on.nats_url, on.engine_port, mode, more)
            made[mode] = await stack.enter_async_context(proxy)
        yield made


async def rounds(options: argparse.Namespace) -> list[Round]:
    with forgetful_collector() as collector:
        async with proxies(collector) as made:
            for proxy in made.values():
                await proxy.loaded("warm", AT_ONCE, options.calls)
            found: list[Round] = []
            until = time.monotonic() + options.seconds
            while len(found) < options.rounds and (time.monotonic() < until or len(found) < _LEAST):
                found.append(await _round(made, len(found), options.calls))
            return found


async def _round(made: dict[str, Bench], number: int, calls: int) -> Round:
    modes = list(made)
    found = {}
    for mode in modes[number % len(modes) :] + modes[: number % len(modes)]:
        spent, cpu_ms = await made[mode].loaded(f"round-{number}", AT_ONCE, calls)
        found[mode] = Spent(cpu_ms, round(spent.calls / spent.wall_s, 1))
    return found


def costs(measured: list[Round]) -> dict[str, Any]:
    """Shares of `off`: `cpu` that is more, `calls` that are fewer, each with its interval."""
    found: dict[str, Any] = {
        mode: {
            field: round(statistics.median(getattr(each[mode], field) for each in measured), 3)
            for field in Spent.__struct_fields__
        }
        for mode in _MODES
    }
    for mode in _MODES:
        if mode != "off":
            found[mode] |= _said("cpu", [each[mode].cpu_ms / each["off"].cpu_ms - 1 for each in measured])
            found[mode] |= _said("calls", [1 - each[mode].calls_per_s / each["off"].calls_per_s for each in measured])
    return found | {"rounds": len(measured), "each": measured}


def _said(name: str, shares: list[float]) -> dict[str, float]:
    shares = sorted(shares)
    cut = max(0, math.floor(len(shares) / 2 - 0.98 * math.sqrt(len(shares))))  # of a binomial's middle, 1.96 deviations
    named = {name: statistics.median(shares), f"{name}_from": shares[cut], f"{name}_to": shares[-1 - cut]}
    return {key: round(share, 4) for key, share in named.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="openforge bench tracing", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else on stdout")
    parser.add_argument("--calls", type=int, default=160, help="calls of each mode in each round")
    parser.add_argument("--rounds", type=int, default=24, help="how often each mode is measured at most")
    parser.add_argument("--seconds", type=float, default=90, help="no round is begun after this time")
    said = parser.parse_args()
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        del os.environ[name]
    load_before = os.getloadavg()[0]
    try:
        found = costs(uvloop.run(rounds(said)))
    except BadAnswer as error:
        sys.exit(f"openforge: our own proxy failed: {error}")
    found |= {"calls": said.calls, "received_bytes": _Forget.received, "machine": machine(load_before)}
    text = msgspec.json.encode(found)
    print((text if said.json else msgspec.json.format(text, indent=2)).decode())


if __name__ == "__main__":
    main()
