"""Spans by OpenTelemetry's conventions for messaging, and the context of a trace in a message's properties."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import pyarrow as pa
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.propagate import extract, inject
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer, TracerProvider

MOST_LINKS = 128
"""Maximum number of links of a span to the traces of a batch's messages: OpenTelemetry's own limit."""
_NAMES = ("traceparent", "tracestate", "baggage")
"""Properties that the default propagators write."""


def tracer_of(provider: TracerProvider | None) -> Tracer:
    """Return the tracer of this library; None: of the global provider, also one that is set later."""
    return trace.get_tracer("escrowmq", version("escrowmq"), tracer_provider=provider)


@contextmanager
def span_of(
    tracer: Tracer,
    operation: str,
    destination: str | None,
    kind: SpanKind,
    more: Mapping[str, Any],
    links: Iterable[Link] = (),
) -> Iterator[Span]:
    """Yield a span, without making it the current one. It ends with the block, and records its exception."""
    attributes = {"messaging.system": "escrowmq", "messaging.operation.name": operation, **more}
    attributes["messaging.destination.name"] = destination
    name = operation if destination is None else f"{operation} {destination}"
    given = {key: value for key, value in attributes.items() if value is not None}
    span = tracer.start_span(name, kind=kind, attributes=given, links=list(links))
    try:
        yield span
    except Exception as problem:
        record_failure(span, problem)
        raise
    finally:
        span.end()


def record_failure(span: Span, problem: BaseException) -> None:
    """Record a failure in a span. The error type of an EscrowError is its code."""
    code = getattr(problem, "code", None)
    span.set_attribute("error.type", getattr(code, "name", type(problem).__qualname__))
    span.record_exception(problem)
    span.set_status(Status(StatusCode.ERROR, str(problem)))


def with_context(properties: Mapping[str, str] | None, span: Span, most: int) -> Mapping[str, str] | None:
    """Return a message's properties with the context of ``span``. Return them unchanged if they have a context, would
    have more than ``most`` bytes of names and values, or nothing records the span."""
    if not span.get_span_context().is_valid or (properties and "traceparent" in properties):
        return properties
    context: dict[str, str] = {}
    inject(context, trace.set_span_in_context(span))
    found = {**(properties or {}), **context}
    if sum(len(name.encode()) + len(value.encode()) for name, value in found.items()) > most:
        return properties
    return found


def context_of(properties: Mapping[str, str] | None) -> Context:
    """Return the context in a message's properties; an empty one if there is none, or it cannot be read."""
    return extract({name: value for name, value in (properties or {}).items() if name in _NAMES}, Context())


def links_of(batch: pa.RecordBatch) -> list[Link]:
    """Return links to the traces in the properties of a batch's first messages."""
    if "properties" not in batch.schema.names:
        return []
    rows = batch.column("properties").slice(0, MOST_LINKS).to_pylist()
    found = (trace.get_current_span(context_of(dict(row))).get_span_context() for row in rows if row)
    return [Link(one) for one in found if one.is_valid]
