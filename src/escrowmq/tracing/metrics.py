"""OpenTelemetry's four metrics of a messaging client, as a hook."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from opentelemetry import metrics
from opentelemetry.metrics import MeterProvider

from escrowmq import hooks
from escrowmq.model import Act, Outcome

_SECONDS = [0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10]
"""Boundaries of durations, as the conventions advise."""
_TYPES = {"send": "send", "prepare": "send", "relay": "send", "end": "settle", "settle": "settle", "handle": "process"}
"""The operation's type, by its name; other operations do not reach a broker."""


def hook_of(provider: MeterProvider | None) -> hooks.Hook:
    """Return the hook that measures every operation; None: by the global meter provider, also one set later."""
    meter = metrics.get_meter("escrowmq", version("escrowmq"), provider)
    operation, process = (
        meter.create_histogram(name, "s", explicit_bucket_boundaries_advisory=_SECONDS)
        for name in ("messaging.client.operation.duration", "messaging.process.duration")
    )
    sent, consumed = (
        meter.create_counter(f"messaging.client.{name}.messages", "{message}") for name in ("sent", "consumed")
    )

    @contextmanager
    def measure(call: hooks.Call) -> Iterator[None]:
        if (kind := _TYPES.get(call.operation)) is None:
            yield
            return
        given: dict[str, str] = {"messaging.system": "escrowmq", "messaging.operation.type": kind}
        ends = isinstance(call.outcome, Outcome | Act)
        given["messaging.operation.name"] = call.outcome.name.lower() if ends else call.operation
        if call.topic is not None:
            given["messaging.destination.name"] = call.topic
        if kind == "process":
            consumed.add(call.count, given)
        begun = time.perf_counter()
        try:
            yield
        except Exception as problem:
            given["error.type"] = getattr(getattr(problem, "code", None), "name", type(problem).__qualname__)
            raise
        finally:
            (process if kind == "process" else operation).record(time.perf_counter() - begun, given)
            if kind == "send":
                sent.add(call.count, given)

    return measure
