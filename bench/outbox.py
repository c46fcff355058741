"""The relay on PostgreSQL: messages a second and outbox → consumer latency against a naive relay, and costs by table
size.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from _harness import Report, arguments, broker

import escrowmq as mq
from escrowmq import outbox
from escrowmq.outbox.dialects import Dialect
from escrowmq.outbox.relay import Relay
from escrowmq.outbox.relay.leases import Leases
from escrowmq.outbox.relay.marking import PURGE_ROWS, Marker, purge
from escrowmq.outbox.relay.reading import Reader
from escrowmq.outbox.tables import State, trans_message
from escrowmq.outbox.targets.escrow import EscrowTarget
from escrowmq_lab.servers import postgres

TOPIC = "bench-outbox"
KEYS = 1000
BATCH = 250
"""Rows of a batch while costs are measured: the smallest table must have enough for all looks."""
WARM, LOOKS = 3, 10
NAMES = itertools.count()


@contextmanager
def database(options: argparse.Namespace) -> Iterator[sa.Engine]:
    """A fresh PostgreSQL of our own that syncs every commit, or the one that was named; with the tables."""
    with tempfile.TemporaryDirectory(prefix="escrowmq-bench-", dir=options.folder) as folder:
        if options.database_url:
            engine = sa.create_engine(options.database_url)
            outbox.migrate(engine)
            yield engine
            return
        with postgres.serving(Path(folder), durable=True) as server:
            engine = sa.create_engine(server.url, pool_size=10)
            outbox.migrate(engine)
            yield engine
            engine.dispose()


def fill(engine: sa.Engine, rows: int, body: bytes) -> None:
    """Commit messages of a thousand keys."""
    for start in range(0, rows, 5000):
        messages = [mq.Message(TOPIC, body, key=f"k{n % KEYS}") for n in range(start, min(start + 5000, rows))]
        with engine.begin() as connection:
            outbox.send_batch_tx(connection, messages)


def left(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        waiting = trans_message.c.state == State.PENDING.value
        return connection.scalar(sa.select(sa.func.count()).select_from(trans_message).where(waiting)) or 0


def empty(engine: sa.Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("TRUNCATE trans_message")


class Naive:
    """Poll and mark: the oldest unsent row, send it, UPDATE it, commit; one at a time."""

    def __init__(self, engine: sa.Engine, url: str, poll: float) -> None:
        self._engine, self._poll = engine, poll
        self._bus = mq.connect(url)
        self._producer = self._bus.producer("naive")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.sent = 0

    def __enter__(self) -> Naive:
        with self._engine.begin() as connection:  # what its author would have made, too
            connection.exec_driver_sql("CREATE INDEX IF NOT EXISTS naive ON trans_message (seq) WHERE state = 0")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._bus.close()
        with self._engine.begin() as connection:
            connection.exec_driver_sql("DROP INDEX naive")

    def _run(self) -> None:
        c = trans_message.c
        oldest = sa.select(trans_message).where(c.state == State.PENDING.value).order_by(c.seq).limit(1)
        while not self._stop.is_set():
            with self._engine.begin() as connection:
                row = connection.execute(oldest).one_or_none()
                if row is not None:
                    self._producer.send(row.topic, row.body, key=row.key, message_id=row.id)
                    mark = sa.update(trans_message).where(c.seq == row.seq)
                    connection.execute(mark.values(state=State.SENT.value, sent_us=time.time_ns() // 1000))
            if row is None:
                self._stop.wait(self._poll)
            else:
                self.sent += 1


# Messages a second


def relayed(engine: sa.Engine, url: str, rows: int, body: bytes) -> float:
    """From the start of a relay until the outbox is empty."""
    empty(engine)
    fill(engine, rows, body)
    target = EscrowTarget(url)
    relay = Relay(engine, target)
    start = time.perf_counter()
    with relay:
        while relay.statistics.sent < rows:
            time.sleep(0.002)
        taken = time.perf_counter() - start
    target.close()
    assert left(engine) == 0
    return rows / taken


def naively(engine: sa.Engine, url: str, rows: int, body: bytes, seconds: float) -> float:
    """The naive relay, for some seconds, on as many rows."""
    empty(engine)
    fill(engine, rows, body)
    start = time.perf_counter()
    with Naive(engine, url, 0.01) as naive:
        while naive.sent < rows and time.perf_counter() - start < seconds:
            time.sleep(0.005)
        return naive.sent / (time.perf_counter() - start)


# From the commit to the consumer


def latencies(engine: sa.Engine, url: str, rate: float, seconds: float, body: bytes, relay: object) -> list[float]:
    """Milliseconds from a commit until a consumer has the message, at a steady rate of single transactions."""
    empty(engine)
    count = int(rate * seconds)
    topic = f"bench-latency-{os.getpid()}-{next(NAMES)}"
    committed: list[float] = [0.0] * count
    arrived: list[float] = []

    def produce() -> None:
        start = time.perf_counter()
        for number in range(count):
            time.sleep(max(0.0, start + number / rate - time.perf_counter()))
            content = number.to_bytes(8, "big") + body[8:]
            with engine.connect() as connection:
                outbox.send_tx(connection, topic, content, key=f"k{number % KEYS}")
                committed[number] = time.perf_counter()
                connection.commit()

    with mq.connect(url) as bus, bus.consumer(topic, [topic]) as consumer, relay:  # type: ignore[attr-defined]
        producing = threading.Thread(target=produce)
        producing.start()
        for batch in consumer.batches(1000, idle_timeout=30.0):
            now = time.perf_counter()
            bodies = batch.arrow.column("body").to_pylist()
            arrived += [1000 * (now - committed[int.from_bytes(content[:8], "big")]) for content in bodies]
            batch.ack(wait=False)
            if len(arrived) >= count:
                break
        producing.join()
    return sorted(arrived)


def add_latencies(report: Report, name: str, goal: str, values: list[float]) -> None:
    for part in (50, 99):
        report.add(f"{name}, p{part}", "ms", goal, [values[len(values) * part // 100]])


# Costs by the size of the table


def fill_mixed(engine: sa.Engine, rows: int) -> None:
    """``rows`` rows: of ten, five SENT and kept, four PENDING, one HELD; the last with a hundred kinds of keys;
    vacuumed."""
    empty(engine)
    statement = """
        INSERT INTO trans_message (id, lane, state, topic, key, body, delay_us, attempts, due_us, created_us, sent_us)
        SELECT decode(md5(n::text), 'hex'), mod(n, 64),
               CASE WHEN mod(n, 10) < 5 THEN 1 WHEN mod(n, 10) < 9 THEN 0 ELSE 6 END,
               'bench-outbox', 'k' || mod(n, 1000), decode(repeat('ab', 100), 'hex'), 0, 0, 0, n,
               CASE WHEN mod(n, 10) < 5 THEN n END
        FROM generate_series(CAST(%(first)s AS bigint), CAST(%(last)s AS bigint)) n
    """
    for first in range(0, rows, 1_000_000):
        with engine.begin() as connection:
            last = min(first + 1_000_000, rows) - 1
            connection.exec_driver_sql(statement, {"first": first, "last": last})
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("VACUUM ANALYZE trans_message")


def costs(report: Report, engine: sa.Engine, rows: int) -> None:
    """Milliseconds of a claim (read), of marking what was read, and of a purge; each row of a batch."""
    fill_mixed(engine, rows)
    dialect = Dialect(engine)
    leases = Leases(dialect, "bench", 600.0)
    leases.keep()
    reader = Reader(dialect, leases.owner, BATCH, 64 << 20)
    marker = Marker(dialect, leases, deletes=True)
    claims, marks, purges, nothing = [], [], [], []
    with dialect.single.connect() as connection:
        for number in range(WARM + LOOKS):
            start = time.perf_counter()
            batch = reader.pending(connection, leases.lanes)
            read = time.perf_counter()
            marker.mark_all(connection, batch)
            marked = time.perf_counter()
            if number >= WARM:  # until the reader knows how big rows are
                claims.append(1e6 * (read - start) / len(batch))
                marks.append(1e6 * (marked - read) / len(batch))
        for _ in range(2):
            start = time.perf_counter()
            assert purge(dialect, connection, rows, (State.SENT,)) == PURGE_ROWS
            purges.append(1e6 * (time.perf_counter() - start) / PURGE_ROWS)
        for _ in range(LOOKS):
            start = time.perf_counter()
            assert not purge(dialect, connection, -1, (State.SENT, State.DONE))
            nothing.append(1e6 * (time.perf_counter() - start))
    report.add(f"claim, {rows:,} rows in the table", "us/row", "flat", claims)
    report.add(f"mark (delete), {rows:,} rows", "us/row", "flat", marks)
    report.add(f"purge, {rows:,} rows", "us/row", "flat", purges)
    report.add(f"a purge that finds nothing, {rows:,} rows", "us", "flat", nothing)
    idle(report, engine, dialect, leases, rows)
    leases.give_back()


def idle(report: Report, engine: sa.Engine, dialect: Dialect, leases: Leases, rows: int) -> None:
    """A look when nothing is PENDING, and everything else is there: just after all that was PENDING left at once, when
    the index is full of dead entries, and after PostgreSQL's vacuum."""
    with engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM trans_message WHERE state = 0")
    reader = Reader(dialect, leases.owner, BATCH, 64 << 20)
    with dialect.single.connect() as connection:
        for when in ("before the vacuum", "after it"):
            looks = []
            for _ in range(WARM + LOOKS):
                start = time.perf_counter()
                assert not reader.pending(connection, leases.lanes)
                looks.append(1e6 * (time.perf_counter() - start))
            goal = "flat" if when == "after it" else ""
            report.add(f"a look that finds nothing, {rows:,} rows, {when}", "us", goal, looks[WARM:])
            connection.exec_driver_sql("VACUUM trans_message")


def timed(work: Callable[[], float], repeats: int) -> list[float]:
    return [work() for _ in range(repeats)]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--database-url", help="measure on this PostgreSQL (its outbox is emptied) instead of a fresh one"
    )
    parser.add_argument("--rows", type=int, default=10_000_000, help="largest table of the costs")
    parser.add_argument("--messages", type=int, default=100_000, help="messages of one measurement of the relay")
    parser.add_argument("--rate", type=float, default=100.0, help="transactions a second while latency is measured")
    options = parser.parse_args()
    report = Report("outbox", options)
    report.begin()
    body = os.urandom(options.body)
    with database(options) as engine:
        with broker(options) as url:
            measure_rates(report, engine, url, options, body)
            measure_latencies(report, engine, url, options, body)
        for rows in (10**4, 10**5, 10**6, 10**7):
            if rows <= options.rows and report.wants("costs"):
                costs(report, engine, rows)
    report.end()


def measure_rates(report: Report, engine: sa.Engine, url: str, options: argparse.Namespace, body: bytes) -> None:
    if not report.wants("relay"):
        return
    relayed(engine, url, min(options.messages, 20_000), body)
    ours = timed(lambda: relayed(engine, url, options.messages, body), options.repeats)
    few = min(options.messages, 20_000)
    theirs = timed(lambda: naively(engine, url, few, body, options.seconds), options.repeats)
    report.add("relay, batches", "msg/s", ">= 10,000", ours)
    report.add("naive relay, one at a time", "msg/s", "", theirs)
    report.add("relay over naive relay", "times", ">= 5", [statistics.median(ours) / statistics.median(theirs)])


def measure_latencies(report: Report, engine: sa.Engine, url: str, options: argparse.Namespace, body: bytes) -> None:
    if not report.wants("latency"):
        return
    rate, seconds = options.rate, max(options.seconds, 1.0)
    target = EscrowTarget(url)
    ours = latencies(engine, url, rate, seconds, body, Relay(engine, target))
    target.close()
    add_latencies(report, f"latency commit → consumer, {rate:g} tx/s, relay", "", ours)
    theirs = latencies(engine, url, rate, seconds, body, Naive(engine, url, 0.1))
    add_latencies(report, f"latency commit → consumer, {rate:g} tx/s, naive (polls 100 ms)", "", theirs)


if __name__ == "__main__":
    main()
