"""Traces over OTLP, where the environment asks for them and the exporter is installed."""

import importlib.util
import os
from collections.abc import Mapping

from openforge.service.log import log


def set_up_traces(service: str, env: Mapping[str, str] | None = None) -> None:
    """With `OTEL_EXPORTER_OTLP_ENDPOINT` set, spans go there; else nothing is traced and nothing is paid."""
    env = os.environ if env is None else env
    if not env.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        return
    if importlib.util.find_spec("opentelemetry.exporter") is None:
        log.warning("no traces", why="install opentelemetry-exporter-otlp-proto-http to send them")
        return
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": f"openforge-{service}"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
