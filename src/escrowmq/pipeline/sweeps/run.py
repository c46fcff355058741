"""The sweeps on Spark: find candidates in all shards in parallel, join by trans_id, and settle each from the executors.

Candidates are found without locks, each range at its own moment. A candidate that was missed is found by the next run;
one that is not due is left alone. A task that Spark repeats does nothing the second time.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from pyspark.sql import functions as f

from escrowmq.errors import Code, EscrowError, Misuse
from escrowmq.outbox import engines
from escrowmq.outbox.dialects import database_now_us
from escrowmq.pipeline.failures import unwrap_errors
from escrowmq.pipeline.sql.source import SOURCE, read_sql
from escrowmq.pipeline.sql.tables import SqlRead
from escrowmq.pipeline.sweeps.acts import Act, Inconsistent, release_orphan, settle_order
from escrowmq.pipeline.sweeps.books import Books
from escrowmq.pipeline.sweeps.databases import Connections, Databases
from escrowmq.platform.times import to_us

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MOST_ALERTS = 20
"""Maximum number of failures that a task reports by name. All are counted."""
ORPHAN_SECONDS = 600.0

_log = logging.getLogger(__name__)

Row = tuple[str, int | None, bool]
"""A candidate: trans_id, the shard of its order (None: unknown), whether an order was found."""
Done = tuple[str, int, list[tuple[str, str]]]
"""The result of a task: an act, its count, and some of its failures."""


@dataclass(frozen=True, slots=True)
class Swept:
    """The result of a sweep: the count of each :class:`Act`, and some failures (trans_id, error; sorted). The next run
    retries them."""

    acts: dict[str, int]
    alerts: tuple[tuple[str, str], ...]

    @property
    def failed(self) -> int:
        """The number of candidates that were not settled. The next run retries them."""
        return self.acts.get(Act.FAILED, 0)

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values: ``acts``, ``failed``, and ``alerts`` as a list of ``trans_id`` and
        ``error``."""
        alerts = [{"trans_id": trans_id, "error": error} for trans_id, error in self.alerts]
        return {"acts": self.acts, "failed": self.failed, "alerts": alerts}


@unwrap_errors()
def sweep_orders(
    spark: SparkSession,
    databases: Databases,
    *,
    books: Books = Books(),
    unpaid_seconds: float = 0.0,
    now_us: int | None = None,
) -> Swept:
    """Run sweep 1 once: orders that are unpaid ``unpaid_seconds`` after their time are timed out and their stock is
    released; the stock of paid orders becomes sold. Returns counts by result. ``now_us`` is in microseconds since 1970;
    None means the earliest of the databases' clocks. Raises Misuse for databases that lack a table or a column, and
    Unknown if one is unavailable when the sweep is planned. Later failures are in the result."""
    books.check(databases.orders, databases.products)
    over = books.ticks(_read_now_us(now_us, databases) - to_us(unpaid_seconds))
    still, paid = (books.order_settled, "=", False), (books.order_state, "=", books.paid)
    unpaid = ((books.order_state, "=", books.unpaid), (books.order_pay_by, "<=", over))
    due = ((still, paid), (still, *unpaid))
    reads = [SqlRead(url, books.orders, (books.order_trans_id,), where) for where in due for url in databases.orders]
    shard = f.col(SOURCE) % len(databases.orders)
    found = read_sql(spark, reads).select(f.col(books.order_trans_id), shard.cast("int"), f.lit(False))

    def act(to: Connections, row: Row) -> Act:
        [order_db] = to.orders(row[1])
        return settle_order(order_db, to.products, row[0], over, books)

    return _act_on_candidates(found, databases, act)


@unwrap_errors()
def sweep_freezes(
    spark: SparkSession,
    databases: Databases,
    *,
    books: Books = Books(),
    orphan_seconds: float = ORPHAN_SECONDS,
    now_us: int | None = None,
) -> Swept:
    """Run sweep 2 once: stock that has been frozen for ``orphan_seconds`` and has no order is fenced and released as
    unsold. Arguments, result and errors as in :func:`sweep_orders`. Also raises Misuse(BAD_ARGUMENT), before any
    change, if an order is in another shard than ``books.shard_by`` gives."""
    books.check(databases.orders, databases.products)
    old = books.ticks(_read_now_us(now_us, databases) - to_us(orphan_seconds))
    where = ((books.freeze_state, "=", books.frozen), (books.freeze_time, "<=", old))
    more = () if books.shard_by is None else (books.shard_by,)
    frozen = read_sql(spark, [SqlRead(databases.products, books.freezes, (books.freeze_trans_id, *more), where)])
    shard = f.lit(None) if books.shard_by is None else f.pmod(f.crc32(books.shard_by), f.lit(len(databases.orders)))
    frozen = frozen.select(f.col(books.freeze_trans_id).alias("trans_id"), shard.cast("int").alias("shard")).distinct()
    # An order whose freeze is still frozen is not settled: only those need to be read.
    still = ((books.order_settled, "=", False),)
    orders = read_sql(spark, [SqlRead(url, books.orders, (books.order_trans_id,), still) for url in databases.orders])
    orders = orders.select(f.col(books.order_trans_id).alias("trans_id"), f.col(SOURCE).alias("seen"))
    found = frozen.join(orders, "trans_id", "left").persist()
    try:
        if (stray := found.where(f.col("seen") != f.col("shard")).first()) is not None:
            what = f"order {stray['trans_id']} is in database {stray['seen']}, not {stray['shard']}"
            raise Misuse(Code.BAD_ARGUMENT, what, f"orders are not sharded by crc32 of {books.shard_by}: leave it out")
        return _act_on_candidates(
            found.select("trans_id", "shard", f.col("seen").isNotNull()),
            databases,
            lambda to, row: Act.HAS_ORDER if row[2] else release_orphan(to.orders(row[1]), to.products, row[0], books),
        )
    finally:
        found.unpersist()


def _act_on_candidates(found: DataFrame, databases: Databases, act: Callable[[Connections, Row], Act]) -> Swept:
    """Call ``act`` for every candidate row, in parallel on Spark's cores, with a task's connections. Returns the counts
    of the results; logs failures."""
    spread = found.repartition(found.sparkSession.sparkContext.defaultParallelism, found.columns[0])
    results = spread.rdd.mapPartitions(lambda rows: _act_on_rows(rows, databases, act)).collect()
    acts: Counter[str] = Counter()
    for name, count, _ in results:
        acts[name] += count
    alerts = sorted(alert for _, _, some in results for alert in some)
    for trans_id, error in alerts:
        _log.error("ALERT: %s was not settled, the next sweep tries again: %s", trans_id, error)
    return Swept({name: acts[name] for name in Act if acts[name]}, tuple(alerts))


def _act_on_rows(rows: Iterable[Row], databases: Databases, act: Callable[[Connections, Row], Act]) -> list[Done]:
    """Call ``act`` for the candidates of one task, one after the other. Returns counts by result; failures are counted,
    the first named, and left for the next run."""
    done: Counter[Act] = Counter()
    alerts: list[tuple[str, str]] = []
    with Connections(databases) as opened:
        for row in rows:
            try:
                done[act(opened, row)] += 1
            except (sa.exc.SQLAlchemyError, EscrowError, Inconsistent) as problem:
                done[Act.FAILED] += 1
                if len(alerts) < MOST_ALERTS:
                    own = getattr(problem, "orig", None) or problem  # without the statement and its values
                    alerts.append((row[0], str(own).strip().partition("\n")[0]))
    return [(str(name), count, alerts if name is Act.FAILED else []) for name, count in done.items()]


def _read_now_us(now_us: int | None, databases: Databases) -> int:
    """Return ``now_us``, or for None the earliest of the databases' clocks (microseconds since 1970), so that a fast
    clock of this machine cannot make anything due early."""
    if now_us is not None:
        return now_us
    return min(map(read_database_us, (databases.products, *databases.orders)))


def read_database_us(url: str) -> int:
    """Return the time of a database's clock, microseconds since 1970."""
    with engines.opened(url) as engine, engine.connect() as connection:
        return database_now_us(connection)
