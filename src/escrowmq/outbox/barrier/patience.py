"""How long the barrier waits for a local transaction in flight, per kind of database: not at all, or very little.

Nothing here makes an answer right or wrong (see the theory in ``__init__.py``); it only finds those in flight early, and gives up
soon on those that were not found.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from escrowmq.outbox.barrier import columns
from escrowmq.outbox.barrier.columns import Ids

ONE_WAIT = 0.005
"""Seconds that one insert waits for a row in flight that was not found beforehand (PostgreSQL)."""
MARKED = 64
"""Ids that one call binds with a lock each (PostgreSQL, which has a fixed number of them); more are bound without."""

Mask = npt.NDArray[np.bool_]
Reasons = npt.NDArray[np.uint8]


class Patience(ABC):
    """The ways of one kind of database."""

    splits = True
    """Whether a part of the ids can pass where the whole was held up."""

    def __init__(self, engine: sa.Engine, wait: float) -> None:
        self.engine = engine
        self.wait = wait

    @contextmanager
    def alone(self) -> Iterator[sa.Connection]:
        """A connection on which each statement is a transaction, which sees all that is committed when it begins."""
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            yield connection

    def read(self, ids: Ids, branch: str) -> Reasons:
        """The reasons that stand, of all that is committed now; 0 for none."""
        with self.alone() as connection:
            return columns.read(connection, ids, branch)

    @abstractmethod
    def in_flight(self, ids: Ids, branch: str) -> Mask:
        """Which of them local transactions hold right now, as far as can be seen without waiting."""

    @abstractmethod
    def insert(self, ids: Ids, branch: str) -> None:
        """Insert ROLLED_BACK where there is no row, durably. Fails as a whole if that would have to wait too long."""

    @abstractmethod
    def held_up(self, problem: DBAPIError) -> bool:
        """Whether an insert failed because it would have had to wait."""


class PostgresPatience(Patience):
    """``bind_tx`` takes an advisory lock of its transaction before it inserts; the checker sees those locks, and waits for none.

    The checker takes no such locks itself: a server has a few thousand in all.
    """

    def in_flight(self, ids: Ids, branch: str) -> Mask:
        """By the advisory locks that ``bind_tx`` holds."""
        text = sa.text(
            "SELECT classid::bigint, objid::bigint FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        with self.alone() as connection:
            rows = connection.execute(text).all()
        if not rows:
            return np.zeros(len(ids), np.bool_)
        high, low = np.array([tuple(row) for row in rows], np.uint64).T
        return np.isin(lock_keys(ids, branch).view(np.uint64), (high << np.uint64(32)) | low)

    def insert(self, ids: Ids, branch: str) -> None:
        """Waits ``ONE_WAIT`` at most; durable also where the server's commits are not by default."""
        settings = sa.text(
            "SELECT set_config('lock_timeout', :wait, true), set_config('synchronous_commit',"
            " CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END,"
            " true)"
        )
        with (
            self.engine.connect().execution_options(isolation_level="READ COMMITTED") as connection,
            connection.begin(),
        ):
            connection.execute(settings, {"wait": f"{max(1, round(1000 * min(self.wait, ONE_WAIT)))}ms"})
            columns.insert(connection, ids, branch, columns.ROLLED_BACK, strict=False)

    def held_up(self, problem: DBAPIError) -> bool:
        """Lock timeout, deadlock, serialization failure."""
        raw: Any = problem.orig
        state = getattr(raw, "sqlstate", None) or getattr(raw, "pgcode", None)
        return state in ("55P03", "40P01", "40001")


class MariaPatience(Patience):
    """A dirty read shows the rows in flight; an insert that meets one nevertheless fails at once.

    The isolation of each statement is set for it alone (``SET TRANSACTION``). That of the session is its owner's: where it is
    READ UNCOMMITTED, what is in flight must not be taken for committed all the same.
    """

    def read(self, ids: Ids, branch: str) -> Reasons:
        """What is committed, whatever the session is used to."""
        return self._read(ids, branch, "READ COMMITTED")

    def in_flight(self, ids: Ids, branch: str) -> Mask:
        """By reading what is not committed yet."""
        return self._read(ids, branch, "READ UNCOMMITTED") > 0

    def insert(self, ids: Ids, branch: str) -> None:
        """Does not wait (MySQL: a second, it knows no less). READ COMMITTED takes no locks on gaps."""
        with self.alone() as connection:
            begin = "SET @escrowmq_wait = @@SESSION.innodb_lock_wait_timeout, SESSION innodb_lock_wait_timeout = 0"
            connection.exec_driver_sql(begin)
            try:
                connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
                columns.insert(connection, ids, branch, columns.ROLLED_BACK, strict=False)
            finally:
                with suppress(SQLAlchemyError):  # a lost connection; the first error matters more
                    connection.exec_driver_sql("SET SESSION innodb_lock_wait_timeout = @escrowmq_wait")

    def _read(self, ids: Ids, branch: str, level: str) -> Reasons:
        with self.alone() as connection:
            connection.exec_driver_sql(f"SET TRANSACTION ISOLATION LEVEL {level}")
            return columns.read(connection, ids, branch)

    def held_up(self, problem: DBAPIError) -> bool:
        """Lock wait timeout, deadlock, changed row."""
        raw: Any = problem.orig
        return bool(raw.args) and raw.args[0] in (1205, 1213, 1020)


class SqlitePatience(Patience):
    """One writer at a time: a local transaction that has written anything holds up every insert, and none of the reads."""

    splits = False

    def __init__(self, engine: sa.Engine, wait: float) -> None:
        # Without the engine's listeners: one that begins every transaction with BEGIN IMMEDIATE would make reads wait too.
        options = engine.get_execution_options()
        super().__init__(sa.Engine(engine.pool, engine.dialect, engine.url, execution_options=options), wait)

    @contextmanager
    def alone(self) -> Iterator[sa.Connection]:
        """It waits ``wait`` seconds for the end of a commit, and reads nothing uncommitted (of a shared cache)."""
        wanted = {"busy_timeout": round(1000 * self.wait), "read_uncommitted": 0}
        with super().alone() as connection:
            before = [(name, connection.exec_driver_sql(f"PRAGMA {name}").scalar()) for name in wanted]
            try:
                for name, value in wanted.items():
                    connection.exec_driver_sql(f"PRAGMA {name} = {value}")
                yield connection
            finally:
                with suppress(SQLAlchemyError):
                    for name, had in before:
                        connection.exec_driver_sql(f"PRAGMA {name} = {had}")

    def in_flight(self, ids: Ids, branch: str) -> Mask:
        """Nothing can be seen beforehand."""
        return np.zeros(len(ids), np.bool_)

    def insert(self, ids: Ids, branch: str) -> None:
        """Waits ``wait`` seconds for the writer."""
        with self.alone() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            try:
                columns.insert(connection, ids, branch, columns.ROLLED_BACK, strict=False)
                connection.exec_driver_sql("COMMIT")
            except BaseException:
                with suppress(SQLAlchemyError):  # SQLite may have rolled it back already
                    connection.exec_driver_sql("ROLLBACK")
                raise

    def held_up(self, problem: DBAPIError) -> bool:
        """The database is busy."""
        return "locked" in str(problem.orig)


def patience_of(engine: sa.Engine, wait: float) -> Patience:
    """The ways of an engine's database."""
    kinds: dict[str, type[Patience]] = {"postgresql": PostgresPatience, "sqlite": SqlitePatience}
    return kinds.get(engine.dialect.name, MariaPatience)(engine, wait)


def lock_keys(ids: Ids, branch: str) -> npt.NDArray[np.int64]:
    """The numbers of the advisory locks of transactions: well mixed, so that two transactions hardly ever share one."""
    salt = np.frombuffer(hashlib.blake2b(branch.encode(), digest_size=8).digest(), np.uint64)
    high, low = ids.view(np.dtype(">u8")).astype(np.uint64).reshape(-1, 2).T
    return _mixed(_mixed(high ^ salt) + low).view(np.int64)


def _mixed(number: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A permutation of 64 bits (the finalizer of SplitMix64)."""
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return number ^ (number >> np.uint64(31))
