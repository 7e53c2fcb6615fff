"""An OpenTelemetry collector over OTLP/HTTP that keeps what it is sent."""

import gzip
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """`url` is what OTEL_EXPORTER_OTLP_ENDPOINT wants."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []
        """Each with the service that sent it."""
        self.metrics: dict[str, set[str]] = {}
        """Names by service."""
        self.url = ""

    def take(self, path: str, body: bytes) -> None:
        if path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = _service(resource.resource.attributes)
                self.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]
        elif path == "/v1/metrics":
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                names = {metric.name for scope in resource.scope_metrics for metric in scope.metrics}
                self.metrics.setdefault(_service(resource.resource.attributes), set()).update(names)


def _service(attributes: object) -> str:
    return next(pair.value.string_value for pair in attributes if pair.key == "service.name")  # type: ignore[attr-defined]


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            packed = self.headers.get("content-encoding") == "gzip"
            collector.take(self.path, gzip.decompress(body) if packed else body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
