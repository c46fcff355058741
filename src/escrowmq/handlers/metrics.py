"""Prometheus metrics of handlers; needs ``prometheus-client``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from escrowmq.handlers.outcomes import Handled

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


def measure(registry: CollectorRegistry) -> Callable[[Handled], None]:
    """Return the function that counts and times results, for ``app.running(bus, on_handled=...)``.

    - ``escrowmq_handler_messages_total``, by ``handler`` and ``outcome``: acked, retried, dead or released
    - ``escrowmq_handler_seconds``, by ``handler``: a histogram
    """
    from prometheus_client import Counter, Histogram

    labels = ["handler", "outcome"]
    messages = Counter("escrowmq_handler_messages", "Messages, by what became of them.", labels, registry=registry)
    seconds = Histogram("escrowmq_handler_seconds", "Duration in seconds.", ["handler"], registry=registry)

    def on_handled(handled: Handled) -> None:
        count = len(handled.message) if hasattr(handled.message, "arrow") else 1
        messages.labels(handled.handler, handled.outcome).inc(count)
        seconds.labels(handled.handler).observe(handled.seconds)

    return on_handled
