"""Spans around the handling of received messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind

from escrowmq.tracing.spans import context_of, links_of, record_failure, span_of, tracer_of

_handled: ContextVar[tuple[Any, Span] | None] = ContextVar("escrowmq-handled", default=None)
"""The message that is being handled, and its span: a handler may request that span within an iteration."""


@contextmanager
def processing(message: Any, tracer: trace.Tracer | None = None) -> Iterator[Span]:
    """Yield the span ``process TOPIC`` of one received message, the current one within the block, in the trace of its
    sender. It records an exception of the block. Within the iteration of an instrumented consumer it is the existing
    span: use it to have the error of a handler in the trace."""
    handled = _handled.get()
    if handled is not None and handled[0] is message:
        try:
            yield handled[1]
        except Exception as problem:
            record_failure(handled[1], problem)
            raise
        return
    attributes = {
        "messaging.operation.type": "process",
        "messaging.message.id": message.message_id.hex(),
        "messaging.message.body.size": len(message.body),
        "messaging.destination.partition.id": str(message.queue),
        "messaging.escrowmq.offset": message.offset,
        "messaging.escrowmq.attempt": message.attempt,
    }
    outer = trace.get_current_span().get_span_context()
    links = [trace.Link(outer)] if outer.is_valid else []
    tracer = tracer or tracer_of(None)
    with (
        _attached(context_of(message.properties)),
        span_of(tracer, "process", message.topic, SpanKind.CONSUMER, attributes, links) as span,
        _attached(trace.set_span_in_context(span)),
    ):
        mark = _handled.set((message, span))
        try:
            yield span
        finally:
            with suppress(ValueError):  # an abandoned iteration ends elsewhere, in the garbage collector
                _handled.reset(mark)


@contextmanager
def processing_batch(batch: Any, tracer: trace.Tracer | None = None) -> Iterator[Span]:
    """Yield the span ``process`` of a received batch, the current one within the block, with links to the traces of
    its first 128 messages."""
    count = {"messaging.operation.type": "process", "messaging.batch.message_count": len(batch)}
    tracer, links = tracer or tracer_of(None), links_of(batch.arrow)
    spanned = span_of(tracer, "process", None, SpanKind.CONSUMER, count, links)
    with spanned as span, _attached(trace.set_span_in_context(span)):
        yield span


@contextmanager
def _attached(context: Context) -> Iterator[None]:
    token = contexts.attach(context)
    try:
        yield
    finally:
        with suppress(ValueError):  # an abandoned iteration ends in another task; ``detach`` would log that
            token.var.reset(token)
