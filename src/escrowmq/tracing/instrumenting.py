"""The hook that makes spans, and its switch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import Span, SpanKind, Tracer, TracerProvider

from escrowmq import hooks
from escrowmq.model import Outcome
from escrowmq.tracing.consuming import processing, processing_batch
from escrowmq.tracing.metrics import hook_of
from escrowmq.tracing.spans import links_of, span_of, tracer_of, with_context


class EscrowMQInstrumentor(BaseInstrumentor):  # type: ignore[misc]
    """OpenTelemetry instrumentation of the process: ``EscrowMQInstrumentor().instrument(tracer_provider=...,
    meter_provider=...)``. ``opentelemetry-instrument`` finds it by itself."""

    _remove: tuple[Callable[[], None], ...] = ()

    def instrumentation_dependencies(self) -> Collection[str]:
        """Return no packages: it instruments its own."""
        return ()

    def _instrument(self, **kwargs: Any) -> None:
        spans = partial(trace_call, tracer=tracer_of(kwargs.get("tracer_provider")))
        self._remove = hooks.add(spans), hooks.add(hook_of(kwargs.get("meter_provider")))

    def _uninstrument(self, **_: Any) -> None:
        for remove in self._remove:
            remove()


def instrument(tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None) -> None:
    """Start spans and metrics in this process. None: by the global provider, also one that is set later. Idempotent."""
    instrumentor = EscrowMQInstrumentor()
    if not instrumentor.is_instrumented_by_opentelemetry:
        instrumentor.instrument(tracer_provider=tracer_provider, meter_provider=meter_provider)


def uninstrument() -> None:
    """Stop spans and metrics."""
    instrumentor = EscrowMQInstrumentor()
    if instrumentor.is_instrumented_by_opentelemetry:
        instrumentor.uninstrument()


def trace_call(call: hooks.Call, tracer: Tracer) -> Any:
    """Return the context manager that runs one operation within its span."""
    return _SPANS[call.operation](call, tracer)


@contextmanager
def _send(call: hooks.Call, tracer: Tracer) -> Iterator[None]:
    more = {"messaging.operation.type": "send"}
    if call.transaction_id is not None:
        more["messaging.escrowmq.transaction_id"] = str(call.transaction_id)
    with span_of(tracer, call.operation, call.topic, SpanKind.PRODUCER, more) as span:
        _add_context(call, span)
        yield
        if call.topic is None:  # a batch
            span.set_attribute("messaging.batch.message_count", len(call.result))
            return
        span.set_attribute("messaging.message.id", call.result.message_id.hex())
        if call.result.transaction_id is not None:
            span.set_attribute("messaging.escrowmq.transaction_id", str(call.result.transaction_id))


@contextmanager
def _end(call: hooks.Call, tracer: Tracer) -> Iterator[None]:
    operation = call.outcome.name.lower() if isinstance(call.outcome, Outcome) else "end"
    shown = None if isinstance(call.transaction_id, bytes) else str(call.transaction_id)
    more = {"messaging.operation.type": "settle", "messaging.escrowmq.transaction_id": shown}
    with span_of(tracer, operation, None, SpanKind.CLIENT, more) as span:
        yield
        span.set_attribute("messaging.escrowmq.code", call.result.name)


@contextmanager
def _store(call: hooks.Call, tracer: Tracer) -> Iterator[None]:
    more: dict[str, Any] = {"messaging.operation.type": "create"}
    if call.count == 1:
        more["messaging.message.id"] = call.messages[0].id.hex()
    else:
        more["messaging.batch.message_count"] = call.count
    with span_of(tracer, "create", call.topic, SpanKind.PRODUCER, more) as span:
        _add_context(call, span)
        yield


@contextmanager
def _relay(call: hooks.Call, tracer: Tracer) -> Iterator[None]:
    more = {"messaging.operation.type": "send", "messaging.batch.message_count": call.count}
    with span_of(tracer, "relay", None, SpanKind.PRODUCER, more, links_of(call.columns)) as span:
        yield
        span.set_attribute("messaging.escrowmq.refused", int((call.result != 0).sum()))


@contextmanager
def _settle(call: hooks.Call, tracer: Tracer) -> Iterator[None]:
    more: dict[str, Any] = {"messaging.operation.type": "settle"}
    if call.topic is None:
        more["messaging.batch.message_count"] = call.count
    elif "message_id" in call.columns.schema.names:
        more["messaging.message.id"] = call.columns.column("message_id")[0].as_py().hex()
    operation = call.outcome.name.lower()
    with span_of(tracer, operation, call.topic, SpanKind.CLIENT, more, links_of(call.columns)):
        yield


def _handle(call: hooks.Call, tracer: Tracer) -> Any:
    return processing(call.messages[0], tracer) if call.columns is None else processing_batch(call.messages, tracer)


_Make = Callable[[hooks.Call, Tracer], Any]
_SPANS: dict[str, _Make] = {**dict.fromkeys(("send", "prepare"), _send), "end": _end, "store": _store}
_SPANS |= {"relay": _relay, "handle": _handle, "settle": _settle}


def _add_context(call: hooks.Call, span: Span) -> None:
    """Add the span's context to every message, unless its properties are invalid: the client reports that."""
    for at, properties in enumerate(call.properties or ()):
        try:
            given = dict(properties or {})
        except (TypeError, ValueError):
            continue
        if all(isinstance(name, str) and isinstance(value, str) for name, value in given.items()):
            found = with_context(given, span, call.max_properties_bytes)
            if found is not given:
                call.properties[at] = found  # type: ignore[index]  # it is a list here
