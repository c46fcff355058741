"""Reads the barrier rows of one database, and inserts a blocking row for each transaction that has none. Waits only
briefly for transactions in flight.

Waiting never makes an answer right or wrong (see the theory in ``__init__.py``): it only finds transactions in flight
early, and gives up soon on those that were not found.
"""

from __future__ import annotations

import hashlib
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from escrowmq.outbox.barrier import columns
from escrowmq.outbox.barrier.columns import Ids
from escrowmq.outbox.dialects import has_mark, in_a_line
from escrowmq.outbox.session import explain
from escrowmq.platform import failpoints

PIECES = 8
"""Number of pieces of a part whose insert is blocked by a transaction in flight."""
ONE_WAIT = 0.005
"""Lock timeout (s) of one insert, for a transaction in flight that was not found beforehand (PostgreSQL)."""
MARKED = 64
"""Most ids that one call binds with a lock each, because PostgreSQL has a fixed number of locks."""

Mask = npt.NDArray[np.bool_]
Reasons = npt.NDArray[np.uint8]
_log = logging.getLogger(__name__)


class Marks(ABC):
    """The marks of one branch in one database."""

    splits = True
    """Whether a part of the ids can pass where the whole was blocked."""
    busy: frozenset[Any]
    """The marks of errors (see :func:`has_mark`) of a blocked insert."""

    def __init__(self, engine: sa.Engine, branch: str, wait: float) -> None:
        self.engine = self._own = engine
        self.branch, self.wait = branch, wait

    def read(self, ids: Ids) -> Reasons:
        """Return the committed :class:`~escrowmq.outbox.tables.Reason` of each id, 0 if it has no row."""
        try:
            return self._committed(ids)
        except DBAPIError as problem:
            raise explain(problem) from problem.__cause__

    def close(self, ids: Ids, deadline: float) -> Reasons:
        """Insert ROLLED_BACK, durably, for ids that are neither decided nor in flight; then return the committed Reason
        of every id (0: in flight, or the insert failed). ``deadline``: as in :meth:`insert_free`."""
        try:
            self.insert_free(ids, deadline)
        except DBAPIError as problem:
            # a full disk, a replica, a lost connection: existing rows are an answer all the same
            _log.warning("the barrier could not be closed for %d transactions: %s", len(ids), in_a_line(problem))
        failpoints.reach("barrier.closed")
        return self.read(ids)

    def insert_free(self, ids: Ids, deadline: float) -> None:
        """Insert ROLLED_BACK for the ids that have no row and that no transaction in flight holds. A blocked part is
        split, breadth first, so that free ids pass early. Ids still blocked after ``deadline`` (monotonic seconds) are
        left out."""
        parts = deque([ids])
        while parts:
            part = parts.popleft()
            part = part[~self.in_flight(part)]
            if not len(part):
                continue
            try:
                self.insert(part)
            except DBAPIError as problem:
                if not has_mark(problem, self.busy):
                    raise
                if not self.splits or time.monotonic() > deadline:
                    return
                if len(part) > 1:
                    parts.extend(np.array_split(part, min(PIECES, len(part))))

    @contextmanager
    def autocommit(self) -> Iterator[sa.Connection]:
        """Context manager: a connection on which each statement is a transaction that sees all earlier commits."""
        with self._own.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            yield connection

    def _committed(self, ids: Ids) -> Reasons:
        with self.autocommit() as connection:
            return columns.read(connection, ids, self.branch)

    @abstractmethod
    def in_flight(self, ids: Ids) -> Mask:
        """Return a mask of the ids that uncommitted local transactions have bound, as far as that is visible without
        waiting."""

    @abstractmethod
    def insert(self, ids: Ids) -> None:
        """Insert ROLLED_BACK for ids without a row, durably. Fails as a whole if it is blocked too long."""


class PostgresMarks(Marks):
    """PostgreSQL: ``bind_tx`` takes an advisory lock of its transaction before it inserts. The checker reads those
    locks instead of waiting, and takes none: a server has a few thousand in all."""

    busy = frozenset({"55P03", "40P01", "40001"})  # lock timeout, deadlock, serialization failure

    def in_flight(self, ids: Ids) -> Mask:
        """Return a mask of the ids whose advisory locks :func:`bind_tx` holds, without waiting."""
        text = sa.text(
            "SELECT classid::bigint, objid::bigint FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        with self.autocommit() as connection:
            rows = connection.execute(text).all()
        if not rows:
            return np.zeros(len(ids), np.bool_)
        high, low = np.array([tuple(row) for row in rows], np.uint64).T
        return np.isin(lock_keys(ids, self.branch).view(np.uint64), (high << np.uint64(32)) | low)

    def insert(self, ids: Ids) -> None:
        """Insert ROLLED_BACK for ids without a row. Waits ``ONE_WAIT`` seconds at most; durable also where the server's
        commits are not by default."""
        settings = sa.text(
            "SELECT set_config('lock_timeout', :wait, true), set_config('synchronous_commit',"
            " CASE old WHEN 'off' THEN 'on' ELSE old END, true) FROM current_setting('synchronous_commit') AS old"
        )
        engine = self.engine.execution_options(isolation_level="READ COMMITTED")
        with engine.begin() as connection:
            connection.execute(settings, {"wait": f"{max(1, round(1000 * min(self.wait, ONE_WAIT)))}ms"})
            columns.insert(connection, ids, self.branch, columns.ROLLED_BACK, strict=False)


class MariaMarks(Marks):
    """MariaDB and MySQL: a dirty read shows the rows in flight; an insert that meets one nevertheless fails at once.

    Each statement sets its own isolation (``SET TRANSACTION``), because the session's may be READ UNCOMMITTED, where
    rows in flight would look committed.
    """

    busy = frozenset({1205, 1213, 1020})  # lock wait timeout, deadlock, changed row

    def _committed(self, ids: Ids) -> Reasons:
        return self._read_at(ids, "READ COMMITTED")

    def in_flight(self, ids: Ids) -> Mask:
        """Return a mask of the ids that have a row, committed or not (a dirty read)."""
        return self._read_at(ids, "READ UNCOMMITTED") > 0

    def insert(self, ids: Ids) -> None:
        """Insert ROLLED_BACK for ids without a row, and fail without waiting if one is locked (MySQL waits a second,
        its minimum). READ COMMITTED locks no gaps."""
        with self.autocommit() as connection:
            begin = "SET @escrowmq_wait = @@SESSION.innodb_lock_wait_timeout, SESSION innodb_lock_wait_timeout = 0"
            connection.exec_driver_sql(begin)
            try:
                connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
                columns.insert(connection, ids, self.branch, columns.ROLLED_BACK, strict=False)
            finally:
                with suppress(SQLAlchemyError):  # a lost connection; the first error matters more
                    connection.exec_driver_sql("SET SESSION innodb_lock_wait_timeout = @escrowmq_wait")

    def _read_at(self, ids: Ids, level: str) -> Reasons:
        with self.autocommit() as connection:
            connection.exec_driver_sql(f"SET TRANSACTION ISOLATION LEVEL {level}")
            return columns.read(connection, ids, self.branch)


class SqliteMarks(Marks):
    """SQLite, with one writer at a time: a local transaction that has written blocks every insert, but no reads."""

    splits = False
    busy = frozenset({"locked"})

    def __init__(self, engine: sa.Engine, branch: str, wait: float) -> None:
        super().__init__(engine, branch, wait)
        # without the engine's listeners, as one that begins transactions with BEGIN IMMEDIATE would block reads too
        options = engine.get_execution_options()
        self._own = sa.Engine(engine.pool, engine.dialect, engine.url, execution_options=options)

    @contextmanager
    def autocommit(self) -> Iterator[sa.Connection]:
        """Context manager: the connection of :meth:`Marks.autocommit`, which waits ``wait`` seconds for another
        connection's commit, and reads nothing uncommitted (of a shared cache). Restores both settings afterwards."""
        wanted = {"busy_timeout": round(1000 * self.wait), "read_uncommitted": 0}
        with super().autocommit() as connection:
            before = [(name, connection.exec_driver_sql(f"PRAGMA {name}").scalar()) for name in wanted]
            try:
                for name, value in wanted.items():
                    connection.exec_driver_sql(f"PRAGMA {name} = {value}")
                yield connection
            finally:
                with suppress(SQLAlchemyError):
                    for name, had in before:
                        connection.exec_driver_sql(f"PRAGMA {name} = {had}")

    def in_flight(self, ids: Ids) -> Mask:
        """Return a mask of False: SQLite does not show ids in flight."""
        return np.zeros(len(ids), np.bool_)

    def insert(self, ids: Ids) -> None:
        """Insert ROLLED_BACK for ids without a row. Waits ``wait`` seconds for another writer."""
        with self.autocommit() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            try:
                columns.insert(connection, ids, self.branch, columns.ROLLED_BACK, strict=False)
                connection.exec_driver_sql("COMMIT")
            except BaseException:
                with suppress(SQLAlchemyError):  # SQLite may have rolled it back already
                    connection.exec_driver_sql("ROLLBACK")
                raise


def marks_of(engine: sa.Engine, branch: str, wait: float) -> Marks:
    """Return the reader and writer of the barrier rows of ``branch``, for the kind of the engine's database. ``wait``:
    timeout (s) for a transaction in flight."""
    kinds: dict[str, type[Marks]] = {"postgresql": PostgresMarks, "sqlite": SqliteMarks}
    return kinds.get(engine.dialect.name, MariaMarks)(engine, branch, wait)


def lock_keys(ids: Ids, branch: str) -> npt.NDArray[np.int64]:
    """Return the key of the PostgreSQL advisory lock of each transaction id, mixed so that two rarely share one."""
    salt = np.frombuffer(hashlib.blake2b(branch.encode(), digest_size=8).digest(), np.uint64)
    high, low = ids.view(np.dtype(">u8")).astype(np.uint64).reshape(-1, 2).T
    return _mix(_mix(high ^ salt) + low).view(np.int64)


def _mix(number: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return a permutation of 64 bits (the finalizer of SplitMix64)."""
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return number ^ (number >> np.uint64(31))
