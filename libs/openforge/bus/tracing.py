"""W3C trace context on messages: carried where somebody traces, free where nobody does."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import context, trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_propagator = TraceContextTextMapPropagator()
_tracer = trace.get_tracer("openforge.bus")


def inject(headers: dict[str, str]) -> None:
    """Name the current span in the headers, if there is one."""
    if trace.get_current_span().get_span_context().is_valid:
        _propagator.inject(headers)


@contextmanager
def continued(name: str, headers: Mapping[str, str] | None) -> Iterator[None]:
    """A span `name` below the one that the headers name."""
    token = context.attach(_propagator.extract(headers or {}))
    try:
        with _tracer.start_as_current_span(name):
            yield
    finally:
        context.detach(token)
