"""Prometheus metrics of this process's own operations: sends, prepares, decisions, relay steps, handling, settlements.

    from escrowmq import client_metrics

    client_metrics.instrument()  # into prometheus_client's default registry

Needs the extra ``serve`` (``prometheus-client``). It is a hook (:mod:`escrowmq.hooks`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from escrowmq import hooks
from escrowmq.errors import EscrowError
from escrowmq.platform.extras import missing_package

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Histogram

__all__ = ["instrument"]


def instrument(registry: CollectorRegistry | None = None) -> Callable[[], None]:
    """Count and time every operation of this process from now on.

    The metrics, in ``registry`` (None: the default one), have the label ``operation``: ``send``, ``prepare``, ``end``,
    ``store``, ``relay``, ``handle`` or ``settle``.

    - ``escrowmq_client_operations_total``, also with ``result``: ``OK``, the code of an error, or ``FAILED``
    - ``escrowmq_client_messages_total``: messages of operations that succeeded
    - ``escrowmq_client_operation_seconds``: a histogram; of ``handle`` the time until the next message is asked for

    Returns a function that stops it and removes the metrics. Raises Misuse(MISSING_PACKAGE).
    """
    try:
        from prometheus_client import REGISTRY, Counter, Histogram
    except ModuleNotFoundError as problem:
        raise missing_package("prometheus_client", "escrowmq.client_metrics") from problem
    into = registry or REGISTRY
    operations = Counter("escrowmq_client_operations", "Operations.", ["operation", "result"], registry=into)
    messages = Counter(
        "escrowmq_client_messages", "Messages of operations that succeeded.", ["operation"], registry=into
    )
    seconds = Histogram("escrowmq_client_operation_seconds", "Duration in seconds.", ["operation"], registry=into)
    remove = hooks.add(partial(_measure, operations, messages, seconds))

    def stop() -> None:
        remove()
        for metric in (operations, messages, seconds):
            with suppress(KeyError):  # stopped before
                into.unregister(metric)

    return stop


@contextmanager
def _measure(operations: Counter, messages: Counter, seconds: Histogram, call: hooks.Call) -> Iterator[None]:
    begun, result = time.perf_counter(), "FAILED"
    try:
        yield
        result = "OK"
    except GeneratorExit:  # the loop over a consumer ended with this message
        result = "OK"
        raise
    except EscrowError as problem:
        result = problem.code.name
        raise
    finally:
        if result == "OK":
            messages.labels(call.operation).inc(call.count)
        seconds.labels(call.operation).observe(time.perf_counter() - begun)
        operations.labels(call.operation, result).inc()
