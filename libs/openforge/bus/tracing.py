"""One trace for each attempt and each weight version, whoever works on it: carried in headers, or made from its name.

Promises: an attempt's spans and a version's are the same trace in every process, also where a header got lost or the
fact was read from a stream long after; a batch links the attempts that it trained; free where nobody traces, and of
an attempt that is not sampled no span is made and no header is sent.

W3C trace context on messages. Ids made from names mean that all processes sample the same attempts; versions are few,
so all of them are kept.
"""

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from openforge.protos import EpisodeRequested, Fact

_propagator = TraceContextTextMapPropagator()
_tracer = trace.get_tracer("openforge.bus")
_NAMED = context.create_key("openforge-named-span")
_KEEP = 0xFFFFFFFFFFFFFFFF
"""Samplers by ratio look at the low half of a trace's id: zero there is always within."""


def is_on() -> bool:
    """Whether this process traces."""
    return hasattr(trace.get_tracer_provider(), "sampler")


def of_attempt(run: str, episode: str, attempt: int) -> SpanContext:
    """The first span of an attempt; invalid where nobody traces."""
    return _named(f"attempt/{run}/{episode}/{attempt}", keep=False)


def of_version(run: str, version: int) -> SpanContext:
    """The span in which version `version` was made; invalid where nobody traces."""
    return _named(f"version/{run}/{version}", keep=True)


def _named(name: str, *, keep: bool) -> SpanContext:
    sampler = getattr(trace.get_tracer_provider(), "sampler", None)
    return trace.INVALID_SPAN_CONTEXT if sampler is None else _made(name, sampler, keep)


@functools.lru_cache(maxsize=4096)
def _made(name: str, sampler: Any, keep: bool) -> SpanContext:
    """Asked for each call of an attempt. The sampler is the SDK's, which need not be installed."""
    digest = hashlib.blake2b(name.encode(), digest_size=24).digest()
    trace_id, span_id = int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:], "big") or 1
    if keep:
        trace_id = (trace_id & ~_KEEP) or (1 << 64)
    sampled = sampler.should_sample(Context(), trace_id, name).decision.is_sampled()
    flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags)


def forced_ids() -> SpanContext | None:
    """The ids that the span that is being started must have: for the provider's id generator."""
    named = context.get_value(_NAMED)
    return named if isinstance(named, SpanContext) else None


def inject(headers: dict[str, str], fact: Fact | None = None) -> None:
    """Name the current span in the headers, if there is one; a new attempt begins its own.

    Whoever reads a fact of an attempt knows by its name whether the attempt is sampled: where it is not, nothing is
    said.
    """
    if isinstance(fact, EpisodeRequested) and is_on():
        begun = of_attempt(fact.run, fact.episode, fact.attempt)
        if begun.trace_flags.sampled:
            with first_span("attempt", begun, run=fact.run, episode=fact.episode, attempt=fact.attempt):
                _propagator.inject(headers)
        return
    current = trace.get_current_span().get_span_context()
    if current.trace_flags.sampled or (current.is_valid and not _is_of_attempt(fact)):
        _propagator.inject(headers)


@contextmanager
def first_span(
    name: str, named: SpanContext, links: Iterable[SpanContext] = (), **attributes: AttributeValue
) -> Iterator[None]:
    """The span that `named` stands for, current for the time of the block; none where it is not sampled."""
    if not named.trace_flags.sampled:
        yield
        return
    linked = [Link(link) for link in links if link.is_valid]
    token = context.attach(context.set_value(_NAMED, named))
    try:
        span = _tracer.start_span(name, Context(), links=linked, attributes=attributes)
    finally:
        context.detach(token)
    with trace.use_span(span, end_on_exit=True):
        yield


@contextmanager
def span(name: str, below: SpanContext | None = None, **attributes: AttributeValue) -> Iterator[None]:
    """A span below the named one, or below the current one, current for the time of the block.

    Below one that is not sampled there is none, and nothing else to know it by: a proxy's calls are many.
    """
    if below is None:
        with _tracer.start_as_current_span(name, attributes=attributes):
            yield
    elif below.trace_flags.sampled:
        with _below(name, _within(below), attributes):
            yield
    else:
        yield


@contextmanager
def _below(name: str, parent: Context, attributes: Mapping[str, AttributeValue] | None = None) -> Iterator[None]:
    """A span below that of `parent`; where that is not sampled, `parent` alone is current and no span is made."""
    above = trace.get_current_span(parent).get_span_context()
    token = context.attach(parent)
    try:
        if above.is_valid and not above.trace_flags.sampled:
            yield
        else:
            with _tracer.start_as_current_span(name, attributes=attributes):
                yield
    finally:
        context.detach(token)


def _within(named: SpanContext) -> Context:
    return trace.set_span_in_context(NonRecordingSpan(named), Context())


def note(**attributes: AttributeValue) -> None:
    """Say more of the current span."""
    trace.get_current_span().set_attributes(attributes)


@contextmanager
def continued(name: str, headers: Mapping[str, str] | None, fact: Fact | None = None) -> Iterator[None]:
    """A span `name` below the one that the headers name, or that the fact's attempt has."""
    parent = _propagator.extract(headers, Context()) if headers else Context()
    if not trace.get_current_span(parent).get_span_context().is_valid and (named := _attempt_of(fact)).is_valid:
        parent = _within(named)
    with _below(name, parent):
        yield


def _is_of_attempt(fact: Fact | None) -> bool:
    return isinstance(getattr(fact, "episode", None), str) and isinstance(getattr(fact, "attempt", None), int)


def _attempt_of(fact: Fact | None) -> SpanContext:
    if fact is None or not _is_of_attempt(fact):
        return trace.INVALID_SPAN_CONTEXT
    return of_attempt(fact.run, fact.episode, fact.attempt)  # type: ignore[attr-defined]  # by its fields
