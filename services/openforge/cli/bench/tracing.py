"""What tracing costs the proxy: `openforge bench tracing --json`.

The proxy's bench is run as it is (`off`), with a collector and one attempt of a hundred sampled (`sampled`), and with
all of them (`all`), in turns, so that all see the same machine. `cpu` is CPU time of the proxy process a call, and
`calls` are calls a second at sixteen at once; costs are shares of `off`, medians over the rounds. The collector, in
this process, forgets the spans that it takes.
"""

import argparse
import http.server
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

_MODES: dict[str, dict[str, str]] = {
    "off": {},
    "sampled": {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"},
    "all": {"OTEL_TRACES_SAMPLER": "parentbased_always_on"},
}


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


def measured(mode: str, collector: str, calls: int) -> dict[str, float]:
    """CPU milliseconds a call and calls a second of one run of the proxy's bench."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    if mode != "off":
        env |= {"OTEL_EXPORTER_OTLP_ENDPOINT": collector, "OTEL_METRICS_EXPORTER": "none", **_MODES[mode]}
    options = ("--json", "--calls", str(calls), "--repeats", "1", "--memory-calls", "160")
    command = (sys.executable, "-m", "openforge.cli.bench.proxy", *options)
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise SystemExit(f"openforge: bench proxy ended with exit code {done.returncode} ({mode})")
    figures = msgspec.json.decode(done.stdout)
    return {"cpu": figures["proxy_cpu_ms_per_call"], "calls": figures["calls_per_s_c16"]}


def costs(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Shares of `off`: `cpu` that is more, `calls` that are fewer; medians over the rounds."""
    found: dict[str, Any] = {"rounds": rounds}
    for mode in _MODES:
        if mode != "off":
            more = [each[mode]["cpu"] / each["off"]["cpu"] - 1 for each in rounds]
            fewer = [1 - each[mode]["calls"] / each["off"]["calls"] for each in rounds]
            found[mode] = {"cpu": round(statistics.median(more), 4), "calls": round(statistics.median(fewer), 4)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="openforge bench tracing", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else on stdout")
    parser.add_argument("--calls", type=int, default=400, help="calls of each measurement, as in bench proxy")
    parser.add_argument("--rounds", type=int, default=5, help="how often each mode is measured")
    said = parser.parse_args()
    with forgetful_collector() as collector:
        rounds = [{mode: measured(mode, collector, said.calls) for mode in _MODES} for _ in range(said.rounds)]
    text = msgspec.json.encode(costs(rounds) | {"calls": said.calls, "received_bytes": _Forget.received})
    print((text if said.json else msgspec.json.format(text, indent=2)).decode())


if __name__ == "__main__":
    main()
