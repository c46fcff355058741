"""Spans around the handling of received messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind

from escrowmq.tracing.spans import context_of, failed, links_of, span_of, tracer_of

_handled: ContextVar[tuple[Any, Span] | None] = ContextVar("escrowmq-handled", default=None)
"""The message that is being handled here, and its span: an iteration's, within which a handler may ask for one again.
"""


@contextmanager
def processing(message: Any, tracer: trace.Tracer | None = None) -> Iterator[Span]:
    """Yield the span ``process TOPIC`` of one received message, the current one within the block, in the trace of
    whoever sent it. What the block raises is in it.

    Within the iteration of an instrumented consumer it is the span that is there already: use it where the error of
    a handler is to be seen in the trace.
    """
    there = _handled.get()
    if there is not None and there[0] is message:
        try:
            yield there[1]
        except Exception as problem:
            failed(there[1], problem)
            raise
        return
    parent = context_of(message.properties)
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
    token = contexts.attach(parent)
    try:
        with span_of(tracer or tracer_of(None), "process", message.topic, SpanKind.CONSUMER, attributes, links) as span:
            inner = contexts.attach(trace.set_span_in_context(span))
            mark = _handled.set((message, span))
            try:
                yield span
            finally:
                _reset(mark)
                contexts.detach(inner)
    finally:
        contexts.detach(token)


@contextmanager
def processing_batch(batch: Any, tracer: trace.Tracer | None = None) -> Iterator[Span]:
    """Yield the span ``process`` of a received batch, the current one within the block: linked with the traces of
    its first 128 messages, as it is of many."""
    count = {"messaging.operation.type": "process", "messaging.batch.message_count": len(batch)}
    with span_of(tracer or tracer_of(None), "process", None, SpanKind.CONSUMER, count, links_of(batch.arrow)) as span:
        token = contexts.attach(trace.set_span_in_context(span))
        try:
            yield span
        finally:
            contexts.detach(token)


def _reset(mark: Any) -> None:
    try:
        _handled.reset(mark)
    except ValueError:  # the iteration was given up and is ended elsewhere, by the collector
        pass
