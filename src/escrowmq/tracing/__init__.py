"""OpenTelemetry: one trace from the send, or the outbox's row, to the consumer's effect (the extra ``otel``).

Nothing is traced, and nothing is imported or paid for, until :func:`instrument` is called, or the program is started by
``opentelemetry-instrument``. Then the functions of the client, the outbox and the relay are wrapped; where spans go is
the application's (its tracer provider), as everywhere with OpenTelemetry.

The context travels in the properties of messages (``traceparent``, as the W3C writes it), through outbox, relay, broker
and every relay target.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from escrowmq.platform.extras import from_extra

if TYPE_CHECKING:
    from escrowmq.tracing.consuming import processing, processing_batch
    from escrowmq.tracing.instrumenting import EscrowMQInstrumentor, instrument, uninstrument

_LAZY = {
    "processing": "consuming",
    "processing_batch": "consuming",
    "EscrowMQInstrumentor": "instrumenting",
    "instrument": "instrumenting",
    "uninstrument": "instrumenting",
}

__all__ = ["EscrowMQInstrumentor", "instrument", "processing", "processing_batch", "uninstrument"]


__getattr__ = from_extra(__name__, _LAZY, needs={"opentelemetry": "otel"}, who="escrowmq.tracing")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
