"""Differences between SQLite, PostgreSQL and MariaDB/MySQL: error codes, insert-if-absent, relay statements.

The database itself skips a row whose primary key exists, in one statement, and all other errors stay errors. (``INSERT
IGNORE`` is not used: it hides every error of the row, a violated foreign key too.)
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.exc import DBAPIError, IntegrityError

from escrowmq.errors import Code, Misuse

Row = Mapping[str, Any]
"""Values of a row, by column name."""

_NOT_NOW = {
    "55P03",
    "57014",
    "25006",
    "57P03",
    "53300",
    1040,
    1203,
    1290,
    1836,
    "database is locked",
    "table is locked",
}
_DENIED = {"42501", "28000", "28P01", 1044, 1045, 1142, 1143, 1227, "readonly database", "not authorized"}
_DENIED_WORDS = ("password authentication failed", "permission denied", "no pg_hba.conf entry")


def has_mark(problem: DBAPIError, marks: Set[Any]) -> bool:
    """Return whether an error has one of these marks: PostgreSQL's SQLSTATE, MySQL's number, SQLite's words."""
    raw: Any = problem.orig
    state = getattr(raw, "sqlstate", None) or getattr(raw, "pgcode", None)
    first = raw.args[0] if raw is not None and raw.args else None
    if state is not None or isinstance(first, int):
        return state in marks or first in marks
    return any(isinstance(mark, str) and mark in str(raw) for mark in marks)


is_duplicate = partial(has_mark, marks={"23505", 1062, "UNIQUE constraint failed"})
"""Whether a unique key rejected a row."""
is_full = partial(has_mark, marks={"53100", "53200", 1021, 1041, 1114, "database or disk is full"})
"""Whether the database is full."""
may_repeat = partial(has_mark, marks={"40001", "40P01", 1205, 1213})
"""Whether the database rolled the transaction back because of concurrent ones (a serialization failure, a deadlock, a
lock timeout): nothing was done, and a retry may succeed."""
is_busy = partial(has_mark, marks=_NOT_NOW)
"""Whether the database is temporarily unable: locked, too many connections, read-only. Nothing was done."""


def is_denied(problem: DBAPIError) -> bool:
    """Return whether a database's error means that this user lacks a right, or may not log in."""
    text = in_a_line(problem)
    return has_mark(problem, _DENIED) or any(word in text for word in _DENIED_WORDS)


def in_a_line(problem: Exception) -> str:
    """Return a database's error text on one line, without the statement and the traceback."""
    reason = problem.orig if isinstance(problem, DBAPIError) and problem.orig is not None else problem
    return " ".join(str(reason).split()) or type(reason).__name__


# Inserts


def insert_if_absent(dialect: str, table: sa.Table) -> sa.Insert:
    """Return an INSERT without values that skips rows whose primary key exists."""
    if dialect == "postgresql":
        return postgresql.insert(table).on_conflict_do_nothing()
    if dialect == "sqlite":
        return sqlite.insert(table).on_conflict_do_nothing()
    first = next(iter(table.primary_key))
    return mysql.insert(table).on_duplicate_key_update({first.name: first})  # changes nothing


def insert_or_replace(dialect: str, table: sa.Table) -> sa.Insert:
    """Return an INSERT without values whose rows replace those of the same primary key."""
    if dialect in ("postgresql", "sqlite"):
        insert = postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)
        keys = [column.name for column in table.primary_key]
        return insert.on_conflict_do_update(index_elements=keys, set_=_others(table, insert.excluded))
    replace = mysql.insert(table)
    return replace.on_duplicate_key_update(_others(table, replace.inserted))


def insert_new(connection: sa.Connection, column: sa.Column[Any], rows: Sequence[Row]) -> set[bytes]:
    """Insert those of ``rows`` whose primary key does not exist; return the values of ``column`` of the inserted ones.

    The rows have equal values in the other columns of the primary key. MariaDB and MySQL do not report which rows of an
    INSERT were new. There all are tried at once; if some exist, the visible ones are left out; at last, with concurrent
    inserts, they are tried one by one. A duplicate undoes one statement only.
    """
    if connection.dialect.name in ("postgresql", "sqlite"):
        insert = insert_if_absent(connection.dialect.name, column.table).returning(column)
        return {bytes(value) for value in connection.scalars(insert, rows)}
    if _insert_all(connection, column.table, rows):
        return {row[column.name] for row in rows}
    if len(rows) == 1:
        return set()
    same = [other == rows[0][other.name] for other in column.table.primary_key if other is not column]
    known = sa.select(column).where(*same, column.in_([row[column.name] for row in rows]))
    there = {bytes(value) for value in connection.scalars(known)}
    rest = [row for row in rows if row[column.name] not in there]
    if not rest or _insert_all(connection, column.table, rest):
        return {row[column.name] for row in rest}
    return {row[column.name] for row in rest if _insert_all(connection, column.table, [row])}


def _insert_all(connection: sa.Connection, table: sa.Table, rows: Sequence[Row]) -> bool:
    """Insert all rows in one statement, or none; return False if the key of one exists already."""
    insert = sa.insert(table).inline()
    try:
        if len(rows) == 1:
            connection.execute(insert, rows[0])
        else:
            with connection.begin_nested():  # a driver may split what is very long
                connection.execute(insert, rows)
    except IntegrityError as problem:
        if is_duplicate(problem):
            return False
        raise
    return True


def _others(table: sa.Table, given: Any) -> dict[str, Any]:
    return {column.name: given[column.name] for column in table.columns if not column.primary_key}


# The clock


_NOW = {
    "postgresql": "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)",
    "mysql": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))",
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000",
}
_ASK_AGAIN_NS = 60 * 10**9
_ahead: weakref.WeakKeyDictionary[sa.Pool, tuple[int, int]] = weakref.WeakKeyDictionary()
"""By pool of connections, which engines with other options share: how far the database's clock is ahead of this
process's monotonic one (microseconds), and until when that is valid."""


def database_now_us(connection: sa.Connection) -> int:
    """Return microseconds since 1970, approximately by the database's clock: read once a minute, continued by the
    monotonic clock.

    All stored times and ages use this one clock, because the clocks of the machines that write, purge and redrive a
    table may differ.
    """
    now_ns = time.monotonic_ns()
    ahead_us, until_ns = _ahead.get(connection.engine.pool, (0, 0))
    if now_ns >= until_ns:
        name = "mysql" if connection.dialect.name == "mariadb" else connection.dialect.name
        read_us = int(connection.scalar(sa.select(sa.literal_column(_NOW[name], sa.BigInteger))) or 0)
        now_ns = time.monotonic_ns()
        ahead_us = read_us - now_ns // 1000
        _ahead[connection.engine.pool] = (ahead_us, now_ns + _ASK_AGAIN_NS)
    return now_ns // 1000 + ahead_us


# The relay


class Dialect:
    """Differences of one engine for a relay: its clock, its transactions, its lists of numbers. Raises
    Misuse(BAD_ARGUMENT) for anything but an engine of a known database."""

    def __init__(self, engine: sa.Engine) -> None:
        if not isinstance(engine, sa.Engine):
            hint = "give the relay a blocking engine, also in asynchronous programs"
            raise Misuse(Code.BAD_ARGUMENT, f"{type(engine).__name__} is not a SQLAlchemy engine", hint)
        self.name = "mysql" if engine.dialect.name == "mariadb" else engine.dialect.name
        if self.name not in _NOW:
            raise Misuse(Code.BAD_ARGUMENT, f"no relay for {engine.dialect.name}", f"one of {', '.join(_NOW)}")
        self.now_us: sa.ColumnElement[int] = sa.literal_column(_NOW[self.name], sa.BigInteger)
        """Microseconds since 1970 by the database's clock."""
        self.single = engine.execution_options(isolation_level="AUTOCOMMIT")
        """The engine for statements that are a transaction each: no round trips for BEGIN and COMMIT."""
        self._several = engine if self.name == "sqlite" else engine.execution_options(isolation_level="READ COMMITTED")

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """Context manager: a transaction of several statements, each of which sees earlier commits. On SQLite it takes
        the lock at its start, because a transaction that begins with a read would fail at its first write."""
        with self._several.begin() as connection:
            if self.name == "sqlite" and not connection.connection.driver_connection.in_transaction:  # type: ignore[union-attr]
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            yield connection

    def among(self, column: sa.ColumnElement[Any], name: str) -> sa.ColumnElement[bool]:
        """Return the condition that ``column`` is one of the numbers that the bound parameter ``name`` has, in the form
        of :meth:`numbers`."""
        if self.name == "postgresql":
            return column == sa.any_(sa.bindparam(name, type_=postgresql.ARRAY(sa.BigInteger)))
        if self.name == "mysql":
            return column.in_(sa.bindparam(name, expanding=True, literal_execute=True, type_=sa.BigInteger))
        values = sa.func.json_each(sa.bindparam(name, type_=sa.Text)).table_valued("value")
        return column.in_(sa.select(values.c.value))

    def numbers(self, values: Sequence[int]) -> Any:
        """Convert whole numbers to the value of a parameter of :meth:`among`."""
        return json.dumps(list(values)) if self.name == "sqlite" else list(values)
