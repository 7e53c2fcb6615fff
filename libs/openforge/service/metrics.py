"""Numbers of a process, for Prometheus where it listens and over OTLP where the environment says so.

Promises: without `OPENFORGE_METRICS_LISTEN` and `OTEL_EXPORTER_OTLP_ENDPOINT` nothing is counted and nothing is paid;
a counter `x` is `x_total` in Prometheus, a gauge has its own name.
"""

import asyncio
import importlib.util
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from openforge.bus.settings import BadSettings
from openforge.service.health import health
from openforge.service.log import log

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation

LISTEN = "OPENFORGE_METRICS_LISTEN"
_LAG_EVERY_S = 1.0
_FRESH_S = 0.5

Numbers = Iterable[tuple[str, float, Mapping[str, str]]]
"""Name, value, labels."""


class Instrument(msgspec.Struct, frozen=True):
    name: str
    kind: str
    help: str


class Metrics:
    """Where numbers go. `url` is where Prometheus finds them, empty where it does not."""

    def __init__(self, meter: "Meter", url: str, close: Callable[[], None]) -> None:
        self.url = url
        self.close = close
        self._meter = meter

    def expose(self, instruments: Iterable[Instrument], numbers: Callable[[], Numbers]) -> None:
        """Whenever somebody looks, `numbers` is asked, once for all of them."""
        from opentelemetry.metrics import Observation

        table = _Table(numbers)

        def callback(name: str) -> "Callable[[CallbackOptions], Iterable[Observation]]":
            return lambda _: [Observation(value, labels) for value, labels in table.of(name)]

        for instrument in instruments:
            gauge, counter = self._meter.create_observable_gauge, self._meter.create_observable_counter
            make = gauge if instrument.kind == "gauge" else counter
            make(instrument.name, callbacks=[callback(instrument.name)], description=instrument.help)


class _Table:
    """The numbers of one look."""

    def __init__(self, numbers: Callable[[], Numbers]) -> None:
        self._numbers = numbers
        self._looked_at = -1.0
        self._by_name: dict[str, list[tuple[float, dict[str, str]]]] = {}

    def of(self, name: str) -> list[tuple[float, dict[str, str]]]:
        if time.monotonic() - self._looked_at > _FRESH_S:
            self._by_name = {}
            for key, value, labels in self._numbers():
                self._by_name.setdefault(key, []).append((value, dict(labels)))
            self._looked_at = time.monotonic()
        return self._by_name.get(name, [])


def set_up_metrics(service: str, env: Mapping[str, str] | None = None) -> Metrics | None:
    """None where nobody wants any. Raises `BadSettings` where they cannot be had."""
    env = os.environ if env is None else env
    listen, otlp = env.get(LISTEN, ""), env.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    if not listen and not (otlp and env.get("OTEL_METRICS_EXPORTER", "otlp") == "otlp"):
        return None
    if importlib.util.find_spec("opentelemetry.exporter") is None:
        log.warning("no metrics", why="install openforge[seeing] to send or show them")
        return None
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.resources import Resource

    readers: list[Any] = []
    if listen:
        from opentelemetry.exporter.prometheus import PrometheusMetricReader

        readers.append(PrometheusMetricReader(scope_info_enabled=False))
    if otlp and env.get("OTEL_METRICS_EXPORTER", "otlp") == "otlp":
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        readers.append(PeriodicExportingMetricReader(OTLPMetricExporter()))
    provider = MeterProvider(readers, resource=Resource.create({"service.name": f"openforge-{service}"}))

    url, stop = _serve(listen) if listen else ("", None)

    def close() -> None:
        provider.shutdown()
        if stop is not None:
            stop()

    return Metrics(provider.get_meter("openforge"), url, close)


def _serve(listen: str) -> tuple[str, Callable[[], None]]:
    from prometheus_client import start_http_server

    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal():
        raise BadSettings(f"{LISTEN} = {listen!r} is no address: use HOST:PORT, 0.0.0.0:9464 to be seen from outside")
    try:
        server, thread = start_http_server(int(port), addr=host)
    except OSError as error:
        raise BadSettings(f"{LISTEN} = {listen!r} cannot be listened on ({error}): use a free port") from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return f"http://{host}:{server.server_port}/metrics", stop


PROCESS = (
    Instrument("openforge_ready", "gauge", "1 where the service can work."),
    Instrument("openforge_loop_lag_seconds", "gauge", "How late the event loop woke from its last sleep of 1 s."),
    Instrument("openforge_says", "gauge", "Numbers that the service says of itself, as in its health file."),
)


class Process:
    """What a service process knows of itself alone."""

    def __init__(self) -> None:
        self._lag_s = 0.0

    def numbers(self) -> Numbers:
        yield "openforge_ready", float(health.is_ready), {}
        yield "openforge_loop_lag_seconds", self._lag_s, {}
        for name, value in list(health.detail.items()):
            if isinstance(value, int | float):
                yield "openforge_says", float(value), {"name": name}

    async def keep_measuring(self) -> None:
        """Until it is cancelled."""
        while True:
            slept = time.monotonic()
            await asyncio.sleep(_LAG_EVERY_S)
            self._lag_s = max(time.monotonic() - slept - _LAG_EVERY_S, 0.0)
