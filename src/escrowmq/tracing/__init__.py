"""OpenTelemetry: one trace from the send, or the outbox's row, to the consumer's effect (the extra ``otel``).

Nothing is traced or imported until :func:`instrument` is called, or ``opentelemetry-instrument`` starts the program.
Then the functions of the client, the outbox and the relay are wrapped; the tracer provider of the application gets the
spans. The context is in the properties of messages (the W3C's ``traceparent``), through outbox, relay, broker and every
relay target.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from escrowmq.platform.extras import from_extra

if TYPE_CHECKING:
    from escrowmq.tracing.consuming import processing, processing_batch
    from escrowmq.tracing.instrumenting import EscrowMQInstrumentor, instrument, uninstrument

_LAZY = dict.fromkeys(("processing", "processing_batch"), "consuming")
_LAZY |= dict.fromkeys(("EscrowMQInstrumentor", "instrument", "uninstrument"), "instrumenting")

__all__ = ["EscrowMQInstrumentor", "instrument", "processing", "processing_batch", "uninstrument"]


__getattr__ = from_extra(__name__, _LAZY, needs={"opentelemetry": "otel"}, who="escrowmq.tracing")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
