"""Names and attributes of spans, by OpenTelemetry's conventions for messaging, and the context of a trace in a
message's properties.
"""

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

SYSTEM = "escrowmq"
MOST_LINKS = 128
"""Messages of a batch whose traces its span is linked with; OpenTelemetry's own bound of links."""
_NAMES = ("traceparent", "tracestate", "baggage")
"""What propagators that are set by default write."""


def tracer_of(provider: TracerProvider | None) -> Tracer:
    """Return the tracer of spans of this library; None: that of the global provider, whenever it is set."""
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
    """Yield a span that is not made the current one. It ends with the block; what the block raises is in it."""
    attributes = {"messaging.system": SYSTEM, "messaging.operation.name": operation, **more}
    if destination is not None:
        attributes["messaging.destination.name"] = destination
    name = operation if destination is None else f"{operation} {destination}"
    given = {key: value for key, value in attributes.items() if value is not None}
    span = tracer.start_span(name, kind=kind, attributes=given, links=list(links))
    try:
        yield span
    except Exception as problem:
        failed(span, problem)
        raise
    finally:
        span.end()


def failed(span: Span, problem: BaseException) -> None:
    """Record the failure of a span's work; of our errors the code is its type."""
    code = getattr(problem, "code", None)
    span.set_attribute("error.type", getattr(code, "name", type(problem).__qualname__))
    span.record_exception(problem)
    span.set_status(Status(StatusCode.ERROR, str(problem)))


def with_context(properties: Mapping[str, str] | None, span: Span, most: int) -> Mapping[str, str] | None:
    """Return a message's properties with the context of ``span``, unless it has one, they would then have more than
    ``most`` bytes of names and values, or nobody records: then as they are."""
    if not span.get_span_context().is_valid or (properties and "traceparent" in properties):
        return properties
    context: dict[str, str] = {}
    inject(context, trace.set_span_in_context(span))
    found = {**(properties or {}), **context}
    if sum(len(name.encode()) + len(value.encode()) for name, value in found.items()) > most:
        return properties
    return found


def context_of(properties: Mapping[str, str] | None) -> Context:
    """Return the context that a message brings; an empty one if it brings none that can be read."""
    return extract({name: value for name, value in (properties or {}).items() if name in _NAMES}, Context())


def link_of(properties: Mapping[str, str] | None) -> Link | None:
    """Return a link with the trace that a message brings."""
    found = trace.get_current_span(context_of(properties)).get_span_context()
    return Link(found) if found.is_valid else None


def links_of(batch: pa.RecordBatch) -> list[Link]:
    """Return links with the traces of a batch's first messages that bring one."""
    if "properties" not in batch.schema.names:
        return []
    rows = batch.column("properties").slice(0, MOST_LINKS).to_pylist()
    found = (link_of(dict(row)) for row in rows if row)
    return [link for link in found if link is not None]
