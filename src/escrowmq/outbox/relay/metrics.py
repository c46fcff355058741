"""The numbers of a relay and of its table, also as Prometheus metrics."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from math import inf
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from escrowmq.outbox.dialects import Dialect
from escrowmq.outbox.relay.holding import is_head
from escrowmq.outbox.tables import State, state_is, trans_lane, trans_message

_log = logging.getLogger(__name__)
_c = trans_message.c

COUNT_SECONDS = 5.0
"""Minimum interval between two counts of the table's rows, whose cost grows with their number."""


def _number(meaning: str, *, name: str | None = None, kind: str = "counter") -> Any:
    return field(default=0, metadata={"meaning": meaning, "name": name, "kind": kind})


@dataclass(frozen=True, slots=True)
class Backlog:
    """The unsent rows of ``trans_message``; the metadata of a field has its meaning."""

    pending: int = _number("rows committed and not sent")
    retrying: int = _number("rows refused, or put aside: tried again later")
    held: int = _number("rows behind a retrying or waiting one of their key")
    waiting: int = _number("rows whose tries ran out: they need an operator")
    lag: float = 0.0
    """Seconds since the oldest pending or retrying row was written, by the database's clock; 0: there is none."""

    @property
    def unsent(self) -> int:
        """Rows that a relay sends without an operator; held rows behind them follow."""
        return self.pending + self.retrying

    def as_dict(self) -> dict[str, Any]:
        """Return names and numbers, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts since the start of this relay, and its state now. :data:`METRICS` has the meaning of each number."""

    sent: int = _number("messages with the target's durable OK")
    refused: int = _number("refusals of the target, one per try")
    waiting: int = _number("messages whose tries ran out: they need an operator", name="given_up")
    repeated: int = _number("messages whose OK could not be marked: they are or were sent again")
    redelivered: int = _number("messages sent again because no callback came")
    purged: int = _number("kept rows that were deleted")
    batches: int = _number("batches with at least one OK")
    target_failures: int = _number("batches that the target did not take")
    database_failures: int = _number("times that the database was away")
    lanes: int = _number("lanes that this relay has leased", kind="gauge")
    lag: float = _number(
        "age of the oldest row that is still to be sent, in any lane", name="lag_seconds", kind="gauge"
    )
    """By the database's clock, measured once a second; rows that need an operator do not count. 0: there is none."""

    def as_dict(self) -> dict[str, Any]:
        """Return names and numbers, for JSON."""
        return asdict(self)


_FIELDS = {one.metadata["name"] or one.name: one for one in fields(Statistics)}
METRICS: dict[str, tuple[str, str]] = {
    name: (one.metadata["kind"], one.metadata["meaning"]) for name, one in _FIELDS.items()
}
"""Kind and meaning by name. Exported as ``escrowmq_relay_NAME``, with the label ``target``."""
BACKLOG: dict[str, str] = {one.name: one.metadata["meaning"] for one in fields(Backlog) if one.metadata}
"""Of the table, whichever relay has the rows; gauges, exported as ``escrowmq_outbox_NAME``. Absent while the database
is away."""


class Counters:
    """The numbers behind :class:`Statistics`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._lanes: dict[int, int] = {}
        self._lag = self._lag_at = 0.0

    def add(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def set_lanes(self, worker: int, lanes: int) -> None:
        """Set the number of lanes that a worker has leased."""
        with self._lock:
            self._lanes[worker] = lanes

    def set_lag(self, seconds: float) -> None:
        """Set the age of the oldest row that is to be sent; 0: there is none."""
        with self._lock:
            self._lag, self._lag_at = seconds, time.monotonic()

    def now(self) -> Statistics:
        with self._lock:
            grown = time.monotonic() - self._lag_at if self._lag else 0.0  # since it was measured
            return Statistics(**self._counts, lanes=sum(self._lanes.values()), lag=self._lag + grown)


def collector(target: str, statistics: Callable[[], Statistics], backlog: Callable[[], Backlog]) -> Any:
    """Return a collector of ``prometheus_client`` for a relay: ``registry.register(collector("escrow://...",
    lambda: relay.statistics, relay.backlog))``."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector

    lock = threading.Lock()  # one query at a time
    last: tuple[float, Backlog | None] = (-inf, None)

    def count_rows() -> Backlog | None:
        """Return the last count, at most :data:`COUNT_SECONDS` old; None: the database is away."""
        nonlocal last
        with lock:
            if time.monotonic() - last[0] >= COUNT_SECONDS:
                try:
                    rows: Backlog | None = backlog()
                except SQLAlchemyError as problem:
                    _log.warning("the rows of the outbox could not be counted: %s", problem)
                    rows = None
                last = (time.monotonic(), rows)
            return last[1]

    class RelayCollector(Collector):
        def collect(self) -> Iterator[Metric]:
            numbers, rows = statistics(), count_rows()
            for name, (kind, meaning) in METRICS.items():
                family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
                metric = family(f"escrowmq_relay_{name}", meaning, labels=["target"])
                metric.add_metric([target], getattr(numbers, _FIELDS[name].name))
                yield metric
            for name, meaning in BACKLOG.items() if rows is not None else ():
                yield GaugeMetricFamily(f"escrowmq_outbox_{name}", meaning, value=getattr(rows, name))

        def describe(self) -> Iterator[Metric]:
            return iter(())

    return RelayCollector()


# The table, not a relay's lanes, has the backlog: a row may be in a lane of another relay, living or dead


def read_backlog(dialect: Dialect, connection: sa.Connection) -> Backlog:
    """Count the unsent rows of the table by state, and measure their lag. The cost grows with their number."""
    counts = {}
    for state in (State.PENDING, State.RETRYING, State.HELD, State.WAITING):
        counted = sa.select(sa.func.count()).select_from(trans_message).where(state_is(state))
        if state is State.WAITING:
            counted = counted.where(_c.sent_us.is_(None))  # the others only lack the callback
        counts[state.name.lower()] = int(connection.scalar(counted) or 0)
    return Backlog(**counts, lag=lag_seconds(dialect, connection))


def lag_seconds(dialect: Dialect, connection: sa.Connection) -> float:
    """Return the age (s) of the oldest row that a relay has still to send: the first PENDING one of a lane, or a
    RETRYING one. 0: there is none."""
    now_us = int(connection.scalar(sa.select(dialect.now_us)) or 0)
    retrying = sa.select(sa.func.min(_c.created_us)).where(state_is(State.RETRYING))
    found = [*connection.scalars(_FIRST_OF_LANES), connection.scalar(retrying)]
    created = [created_us for created_us in found if created_us is not None]
    return max((now_us - min(created)) / 1e6, 1e-6) if created else 0.0


def due_now(dialect: Dialect, connection: sa.Connection, waiting_holds: bool) -> bool:
    """Return whether a row of any lane is to be sent now: a PENDING one, a RETRYING one that is due or only stepped
    aside because its broker is away, or a HELD one whose key no row holds any more (see :func:`is_head`)."""
    soon = sa.or_(_c.due_us <= dialect.now_us, _c.attempts == 0)
    for wanted in (state_is(State.PENDING), sa.and_(state_is(State.RETRYING), soon)):
        if connection.scalar(sa.select(_c.seq).where(wanted).limit(1)) is not None:
            return True
    keys = sa.select(_c.lane, _c.key).distinct()
    held = {tuple(row) for row in connection.execute(keys.where(state_is(State.HELD)))}
    heads = {tuple(row) for row in connection.execute(keys.where(is_head(waiting_holds)))} if held else set()
    return not held <= heads


_FIRST_OF_LANES = sa.select(
    sa.select(_c.created_us)
    .where(_c.lane == trans_lane.c.lane, state_is(State.PENDING))
    .order_by(_c.seq)
    .limit(1)
    .correlate(trans_lane)
    .scalar_subquery()
)
"""One index look-up per lane, however many rows are pending."""
