"""Traces over OTLP, where the environment asks for them and the exporter is installed.

Promises: spans that have a name of their own (`openforge.bus.tracing`) get the ids that follow from it, all others
random ones; `OTEL_TRACES_SAMPLER` and `OTEL_TRACES_SAMPLER_ARG` choose which attempts are traced, the same in every
process; at the end of the process, what was seen is sent.
"""

import importlib.util
import os
from collections.abc import Callable, Mapping

from openforge.bus import tracing
from openforge.service.log import log


def set_up_traces(service: str, env: Mapping[str, str] | None = None) -> Callable[[], None]:
    """With `OTEL_EXPORTER_OTLP_ENDPOINT` set, spans go there until what is returned is called; else nothing is traced
    and nothing is paid.
    """
    env = os.environ if env is None else env
    if not env.get("OTEL_EXPORTER_OTLP_ENDPOINT") or env.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return lambda: None
    if importlib.util.find_spec("opentelemetry.exporter") is None:
        log.warning("no traces", why="install openforge[seeing] to send them")
        return lambda: None
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Ids(RandomIdGenerator):
        def generate_trace_id(self) -> int:
            named = tracing.forced_ids()
            return named.trace_id if named else super().generate_trace_id()

        def generate_span_id(self) -> int:
            named = tracing.forced_ids()
            return named.span_id if named else super().generate_span_id()

    resource = Resource.create({"service.name": f"openforge-{service}"})
    provider = TracerProvider(resource=resource, id_generator=Ids())
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return provider.shutdown
