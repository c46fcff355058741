"""The numbers of a relay and of its table as Prometheus metrics."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from escrowmq.outbox.relay.backlog import Backlog
from escrowmq.outbox.relay.statistics import Statistics

_log = logging.getLogger(__name__)

COUNT_SECONDS = 5.0
"""The rows of the table are counted this often at most, however often somebody asks: counting costs what there is to
count.
"""

METRICS: dict[str, tuple[str, str]] = {
    "sent": ("counter", "messages with the target's durable OK"),
    "refused": ("counter", "refusals of the target, one per try"),
    "given_up": ("counter", "messages whose tries ran out: they wait for a person"),
    "repeated": ("counter", "messages whose OK could not be marked: they are or were sent again"),
    "redelivered": ("counter", "messages sent again because no callback came"),
    "purged": ("counter", "kept rows that were deleted"),
    "batches": ("counter", "batches with at least one OK"),
    "target_failures": ("counter", "batches that the target did not take"),
    "database_failures": ("counter", "times that the database was away"),
    "lanes": ("gauge", "lanes that this relay has leased"),
    "lag_seconds": ("gauge", "age of the oldest row that is still to be sent, whoever has its lane"),
}
"""By name: kind and meaning. Exported as ``escrowmq_relay_NAME``, with the label ``target``."""

BACKLOG: dict[str, str] = {
    "pending": "rows committed and not sent",
    "retrying": "rows refused, or put aside: tried again later",
    "held": "rows behind a retrying or waiting one of their key",
    "waiting": "rows whose tries ran out: they wait for a person",
}
"""Of the table, whichever relay has the rows; gauges, exported as ``escrowmq_outbox_NAME``. Absent while the database
is away.
"""

_STATISTICS = {"given_up": "waiting", "lag_seconds": "lag"}
"""Where a metric has another name than its number."""


def collector(target: str, statistics: Callable[[], Statistics], backlog: Callable[[], Backlog]) -> Any:
    """Return a collector of ``prometheus_client`` for a relay: ``registry.register(collector("escrow://...",
    lambda: relay.statistics, relay.backlog))``."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector

    counted = _Counted(backlog)

    class RelayCollector(Collector):
        def collect(self) -> Iterator[Metric]:
            numbers, rows = statistics().as_dict(), counted.now()
            for name, (kind, meaning) in METRICS.items():
                family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
                metric = family(f"escrowmq_relay_{name}", meaning, labels=["target"])
                metric.add_metric([target], numbers[_STATISTICS.get(name, name)])
                yield metric
            for name, meaning in BACKLOG.items() if rows is not None else ():
                yield GaugeMetricFamily(f"escrowmq_outbox_{name}", meaning, value=getattr(rows, name))

        def describe(self) -> Iterator[Metric]:
            return iter(())

    return RelayCollector()


class _Counted:
    """The last count of the rows, not older than :data:`COUNT_SECONDS`. One asks the database at a time."""

    def __init__(self, backlog: Callable[[], Backlog]) -> None:
        self._backlog = backlog
        self._lock = threading.Lock()
        self._at = -COUNT_SECONDS
        self._rows: Backlog | None = None

    def now(self) -> Backlog | None:
        """None: the database is away."""
        with self._lock:
            if time.monotonic() - self._at >= COUNT_SECONDS:
                try:
                    self._rows = self._backlog()
                except SQLAlchemyError as problem:
                    _log.warning("the rows of the outbox could not be counted: %s", problem)
                    self._rows = None
                self._at = time.monotonic()
            return self._rows
