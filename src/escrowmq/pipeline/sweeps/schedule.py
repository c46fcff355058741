"""Scheduled sweeps: on any number of machines, one at a time, with an alarm to an operator about failures.

Turns are the multiples of an interval by the clock of the product database, so that all machines wake at the same
moment. The machine that gets that database's lock sweeps; the others skip the turn. The lock only saves work: it is
safe to sweep twice at once.
"""

from __future__ import annotations

import json
import logging
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from escrowmq.errors import Code, EscrowError, Misuse, error
from escrowmq.outbox import engines
from escrowmq.outbox.dialects import in_a_line
from escrowmq.pipeline.sweeps.run import Swept, read_database_us
from escrowmq.platform.listening import shown_address
from escrowmq.platform.times import to_us

TURN_SECONDS = 3.0
"""Minimum time to hold a turn, in seconds. A machine whose timer is late by less finds the lock taken."""
ALARM_SECONDS = 10.0
"""Timeout of one delivery of an alarm."""
ALARM_TRIES = 3
MOST_REASON = 1000
"""Maximum number of characters of an error. Java errors contain a traceback."""
_LOCK = "escrowmq sweep"
_POSTGRESQL_LOCK = "SELECT pg_try_advisory_lock(hashtextextended(COALESCE(current_schema(), ''), :it))"
_LOCK_NUMBER: Any = 0x6573_6372_6F77_7377
"""PostgreSQL locks are numbers: the lock is derived from this number and the name of the schema."""

_log = logging.getLogger(__name__)

Sweeps = Callable[[], Mapping[str, Swept]]
"""Runs the sweeps once. Returns their results by name."""


class Totals:
    """Sums over all runs of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.runs = self.left_out = self.broken_off = self.alarms = self.alarms_lost = 0
        self.acts: Counter[tuple[str, str]] = Counter()
        self.waiting: dict[str, int] = {}
        """By sweep: what its last run could not settle."""

    def add(self, found: Mapping[str, Swept]) -> None:
        """Add the results of one run, by name of the sweep."""
        with self._lock:
            self.runs += 1
            for name, swept in found.items():
                self.waiting[name] = swept.failed
                self.acts.update({(name, act): count for act, count in swept.acts.items()})

    def snapshot(self) -> tuple[dict[tuple[str, str], int], dict[str, int]]:
        """Return the number of candidates by (sweep, result), and by sweep those that its last run could not settle."""
        with self._lock:
            return dict(self.acts), dict(self.waiting)


@contextmanager
def turn(url: str) -> Iterator[bool]:
    """Context manager: take the lock on sweeping in the product database at ``url``, without waiting, and hold it.
    Yields False if another process has it."""
    with engines.opened(url) as engine:
        if engine.dialect.name == "sqlite":
            with _file_lock(engine.url.database) as held:
                yield held
            return
        if engine.dialect.name == "postgresql":
            query, lock = _POSTGRESQL_LOCK, _LOCK_NUMBER
        else:  # these locks are per server, so the name contains the database
            query, lock = "SELECT GET_LOCK(:it, 0)", f"{_LOCK} {engine.url.database}"[:64]
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            yield bool(connection.scalar(sa.text(query), {"it": lock}))  # the end of the connection releases it


@contextmanager
def _file_lock(path: str | None) -> Iterator[bool]:
    import fcntl

    if path is None:
        yield True
        return
    with Path(f"{path}.sweep-lock").open("a") as file:  # the lock of the database itself would keep its writers out
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_held = True
        except BlockingIOError:
            is_held = False
        yield is_held


def seconds_to_turn(now_us: int, every: float) -> float:
    """Return the seconds from ``now_us`` (microseconds since 1970) to the next multiple of ``every`` seconds."""
    every_us = to_us(every)
    return (every_us - now_us % every_us) / 1e6


def keep_sweeping(
    sweeps: Sweeps,
    products: str,
    every: float,
    stop: threading.Event,
    *,
    totals: Totals | None = None,
    on_run: Callable[[Mapping[str, Swept] | None], None] = lambda found: None,
    alarm: str | None = None,
) -> None:
    """Call ``sweeps`` at once, and then every ``every`` seconds, until ``stop`` is set; add the results to ``totals``.
    ``products`` is the URL of the database whose lock and clock are used. ``on_run`` is called with the results of each
    run, or with None if another machine had the turn or an error stopped the run. ``alarm`` is a URL to which failures
    are posted, see :func:`post`. An error is reported, and the next turn tries again. Raises Misuse, which is
    permanent."""
    totals = totals or Totals()
    while not stop.is_set():
        found: Mapping[str, Swept] | None = None
        pause = every
        try:
            with turn(products) as mine:
                if mine:
                    found = sweeps()
                    totals.add(found)
                    stop.wait(min(TURN_SECONDS, every / 2))
                else:
                    totals.left_out += 1
                    _log.info("another process sweeps: this turn is skipped")
        except Misuse:
            raise
        except Exception as problem:  # including Spark errors: report them, and try again in the next turn
            if stop.is_set():  # the signal to stop also ended Spark's Java process
                _log.info("stopped during a sweep, the next one does the rest: %s", in_a_line(problem)[:MOST_REASON])
                return
            totals.broken_off += 1
            known = isinstance(problem, EscrowError | sa.exc.SQLAlchemyError | OSError)
            reason = in_a_line(problem)[:MOST_REASON]
            text = "ALERT: a sweep was broken off, the next turn tries again: %s"
            _log.error(text, reason, exc_info=None if known else problem)
            _send_alarm(alarm, totals, {"event": "sweep.broken_off", "error": reason})
        on_run(found)
        if found is not None and any(swept.failed for swept in found.values()):
            _send_alarm(alarm, totals, make_failed_event(found))
        try:
            pause = seconds_to_turn(read_database_us(products), every)
        except (EscrowError, sa.exc.SQLAlchemyError):
            pass  # it is away: this machine's own clock is good enough until it is back
        stop.wait(pause)


def make_failed_event(found: Mapping[str, Swept]) -> dict[str, Any]:
    """Return the event, for :func:`post`, about candidates that a run could not settle: their number by sweep, and at
    least some of them by name."""
    rows = [{"sweep": name, **alert} for name, swept in found.items() for alert in swept.to_json()["alerts"]]
    return {"event": "sweep.failed", "failed": {name: swept.failed for name, swept in found.items()}, "rows": rows}


def _send_alarm(url: str | None, totals: Totals, event: Mapping[str, Any]) -> None:
    try:
        if url is not None:
            post(url, event)
            totals.alarms += 1
    except EscrowError as problem:
        totals.alarms_lost += 1
        _log.error("ALERT: the alarm could not be delivered: %s", problem)


def check_alarm(url: str) -> None:
    """Raise Misuse(BAD_ARGUMENT) unless the URL begins with ``http://`` or ``https://``."""
    if not url.startswith(("http://", "https://")):
        raise error(Code.BAD_ARGUMENT, f"--alarm {shown_address(url)}", "an address to post JSON to: https://HOST/PATH")


def post(url: str, event: Mapping[str, Any]) -> None:
    """Post an event as JSON to ``url``. The receiver must respond with a status of 200 to 299. Tries ``ALARM_TRIES``
    times, then raises Unknown(DISCONNECTED). Raises Misuse(BAD_ARGUMENT) for an invalid URL."""
    check_alarm(url)
    body = json.dumps(event).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    problem = ""
    for _ in range(ALARM_TRIES):
        try:
            with urllib.request.urlopen(request, timeout=ALARM_SECONDS):
                return
        except urllib.error.HTTPError as raised:
            problem = f"it answered {raised.code}"
            raised.close()
        except (OSError, ValueError) as raised:
            problem = str(raised)
    raise error(Code.DISCONNECTED, f"the alarm was not accepted: {problem}")


METRICS: dict[str, tuple[str, str]] = {
    "runs": ("counter", "completed runs"),
    "left_out": ("counter", "turns that another process had"),
    "broken_off": ("counter", "runs aborted by an error"),
    "alarms": ("counter", "delivered alarms"),
    "alarms_lost": ("counter", "alarms that no receiver accepted"),
    "acts": ("counter", "orders and freezes, by sweep and result"),
    "waiting": ("gauge", "orders and freezes that the last run could not settle, by sweep"),
}
"""Kind and meaning of each metric. Exported as ``escrowmq_sweep_NAME``."""


def collector(totals: Totals) -> Any:
    """Return a collector of ``prometheus_client``: ``registry.register(collector(totals))``."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector

    class SweepCollector(Collector):
        def collect(self) -> Iterator[Metric]:
            acts, waiting = totals.snapshot()
            labelled: dict[str, tuple[tuple[str, ...], dict[Any, int]]] = {
                "acts": (("sweep", "act"), acts),
                "waiting": (("sweep",), {(sweep,): count for sweep, count in waiting.items()}),
            }
            for name, (kind, meaning) in METRICS.items():
                family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
                labels, counts = labelled[name] if name in labelled else ((), {(): getattr(totals, name)})
                metric = family(f"escrowmq_sweep_{name}", meaning, labels=labels)
                for values, count in sorted(counts.items()):
                    metric.add_metric(values, count)
                yield metric

        def describe(self) -> Iterator[Metric]:
            return iter(())

    return SweepCollector()
