"""Wraps what sends, ends, relays and receives, and takes the wrapping off again."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]
from opentelemetry.trace import Span, SpanKind, Tracer, TracerProvider

from escrowmq.client.consuming import consumer
from escrowmq.client.producing.production import Production
from escrowmq.model import Message, Outcome
from escrowmq.settings import BrokerSettings
from escrowmq.tracing.consuming import processing, processing_batch, within, within_async
from escrowmq.tracing.spans import links_of, span_of, tracer_of, with_context
from escrowmq.wire import Exchange

_OPERATION = {Exchange.SEND: "send", Exchange.PREPARE: "prepare"}


class EscrowMQInstrumentor(BaseInstrumentor):  # type: ignore[misc]
    """Traces of the whole process, as OpenTelemetry's instrumentations go:
    ``EscrowMQInstrumentor().instrument(tracer_provider=...)``. ``opentelemetry-instrument`` finds it by itself."""

    _wrapped: list[tuple[Any, str, Any]]

    def instrumentation_dependencies(self) -> Collection[str]:
        """None: it is EscrowMQ's own."""
        return ()

    def _instrument(self, **kwargs: Any) -> None:
        tracer = tracer_of(kwargs.get("tracer_provider"))
        self._wrapped = []
        self._wrap(Production, "produce", _produce, tracer)
        self._wrap(Production, "produce_batch", _produce_batch, tracer)
        self._wrap(Production, "end", _end, tracer)
        for name, around in (("messages", processing), ("batches", processing_batch)):
            self._wrap(consumer.ConsumerCalls, name, partial(within_async, around), tracer)
            self._wrap(consumer.Consumer, name, partial(within, around), tracer)
        try:
            from escrowmq.outbox import sending
            from escrowmq.outbox.relay import worker
        except ModuleNotFoundError:  # without the extra ``outbox`` there is nothing of it to trace
            return
        self._wrap(sending, "_insert", _insert, tracer)
        self._wrap(worker.SharedTarget, "send", _relay, tracer)

    def _uninstrument(self, **_: Any) -> None:
        for owner, name, original in reversed(self._wrapped):
            setattr(owner, name, original)
        self._wrapped = []

    def _wrap(self, owner: Any, name: str, made: Callable[[Any, Tracer], Any], tracer: Tracer) -> None:
        original = vars(owner)[name]
        self._wrapped.append((owner, name, original))
        setattr(owner, name, made(original, tracer))


def instrument(tracer_provider: TracerProvider | None = None) -> None:
    """Trace from now on, in this process. None: by the global tracer provider, also one that is set later. Harmless
    when it is called again."""
    instrumentor = EscrowMQInstrumentor()
    if not instrumentor.is_instrumented_by_opentelemetry:
        instrumentor.instrument(tracer_provider=tracer_provider)


def uninstrument() -> None:
    """Trace no more."""
    instrumentor = EscrowMQInstrumentor()
    if instrumentor.is_instrumented_by_opentelemetry:
        instrumentor.uninstrument()


# Sending


def _produce(original: Any, tracer: Tracer) -> Any:
    async def produce(
        self: Production, kind: Exchange, topic: Any, body: Any = None, joined: Any = None, **options: Any
    ) -> Any:
        message = topic if isinstance(topic, Message) else None
        name = topic if message is None else message.topic
        more = {"messaging.operation.type": "send", "messaging.escrowmq.transaction_id": joined and str(joined)}
        with span_of(tracer, _OPERATION[kind], str(name), SpanKind.PRODUCER, more) as span:
            most = self.sessions[0].checker.limits.max_properties_bytes
            if message is not None:
                topic = _trace(message, span, most)
            elif (found := _with(options.get("properties"), span, most)) is not None:
                options = {**options, "properties": found}
            receipt = await original(self, kind, topic, body, joined, **options)
            span.set_attribute("messaging.message.id", receipt.message_id.hex())
            if receipt.transaction_id is not None:
                span.set_attribute("messaging.escrowmq.transaction_id", str(receipt.transaction_id))
            return receipt

    return produce


def _produce_batch(original: Any, tracer: Tracer) -> Any:
    async def produce_batch(self: Production, kind: Exchange, messages: Any, shard: int | None) -> Any:
        with span_of(tracer, _OPERATION[kind], None, SpanKind.PRODUCER, {"messaging.operation.type": "send"}) as span:
            if isinstance(messages, Iterable) and not isinstance(messages, str | bytes | pa.RecordBatch | pa.Table):
                most = self.sessions[0].checker.limits.max_properties_bytes
                messages = [_trace(one, span, most) if isinstance(one, Message) else one for one in messages]
            receipts = await original(self, kind, messages, shard)
            span.set_attribute("messaging.batch.message_count", len(receipts))
            return receipts

    return produce_batch


def _end(original: Any, tracer: Tracer) -> Any:
    async def end(self: Production, transaction_id: Any, outcome: Any, confirm: Any = None) -> Any:
        operation = outcome.name.lower() if isinstance(outcome, Outcome) else "end"
        more = {"messaging.operation.type": "settle", "messaging.escrowmq.transaction_id": _printed(transaction_id)}
        with span_of(tracer, operation, None, SpanKind.CLIENT, more) as span:
            code = await original(self, transaction_id, outcome, confirm)
            span.set_attribute("messaging.escrowmq.code", code.name)
            return code

    return end


def _printed(transaction_id: Any) -> str | None:
    return (
        transaction_id
        if isinstance(transaction_id, str)
        else str(transaction_id)
        if not isinstance(transaction_id, bytes)
        else None
    )


def _trace(message: Message, span: Span, most: int) -> Message:
    found = _with(message.properties, span, most)
    return message if found is None else replace(message, properties=found)


def _with(properties: Any, span: Span, most: int) -> Any:
    """Return the properties with the span's context; None: as they are, also where they are none that could be
    sent, which the client says better."""
    if properties is not None:
        try:
            given = {
                name: value
                for name, value in dict(properties).items()
                if isinstance(name, str) and isinstance(value, str)
            }
        except (TypeError, ValueError):
            return None
        if len(given) != len(properties):
            return None
        properties = given
    found = with_context(properties, span, most)
    return None if found is properties else found


# The outbox


def _insert(original: Any, tracer: Tracer) -> Any:
    most = BrokerSettings().max_properties_bytes

    def insert(session: Any, found: list[Any]) -> None:
        topics = {content.topic for content in found}
        more: dict[str, Any] = {"messaging.operation.type": "create"}
        if len(found) == 1:
            more["messaging.message.id"] = found[0].id.hex()
        else:
            more["messaging.batch.message_count"] = len(found)
        with span_of(tracer, "create", topics.pop() if len(topics) == 1 else None, SpanKind.PRODUCER, more) as span:
            original(session, [_in_row(content, span, most) for content in found])

    return insert


def _in_row(content: Any, span: Span, most: int) -> Any:
    """Return a row of the outbox whose properties have the span's context."""
    before = json.loads(content.properties) if content.properties else None
    found = with_context(before, span, most)
    return content if found is before else content._replace(properties=json.dumps(found))


def _relay(original: Any, tracer: Tracer) -> Any:
    def send(self: Any, batch: pa.RecordBatch) -> Any:
        more = {"messaging.operation.type": "send", "messaging.batch.message_count": batch.num_rows}
        with span_of(tracer, "relay", None, SpanKind.PRODUCER, more, links_of(batch)) as span:
            codes = original(self, batch)
            span.set_attribute("messaging.escrowmq.refused", int((codes != 0).sum()))
            return codes

    return send
