"""Finds the caller's transaction in a session or connection, refuses one that cannot hold a row, explains database
errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, InvalidRequestError, UnboundExecutionError
from sqlalchemy.orm import Session, scoped_session

from escrowmq.errors import Code, EscrowError, Misuse
from escrowmq.outbox.dialects import has_mark
from escrowmq.outbox.migrations import check_schema, translated

AnySession = Session | scoped_session[Any] | sa.Connection
"""What ``_tx`` calls take: the ORM's session (scoped or not) or Core's connection."""

_checked: WeakKeyDictionary[sa.Pool, set[str | None]] = WeakKeyDictionary()
"""Database schemas whose tables were found to be there and of this version. By pool: engines with other options share
it.
"""

_NO_TABLE = {"42P01", "3F000", 1146, "no such table"}
_NO_COLUMN = {"42703", 1054, "has no column named", "no such column"}
_ABORTED = {"25P02"}


@contextmanager
def transaction_of(session: AnySession, table: sa.Table) -> Iterator[sa.Connection]:
    """Yield the connection that carries the caller's transaction, for statements on ``table``; nothing is flushed or
    committed.

    Raises Misuse(NO_TRANSACTION) for AUTOCOMMIT, a closed connection, a failed or ended transaction; Misuse(NO_TABLES)
    and
    Misuse(SCHEMA_VERSION) if the tables are not there or of another version; Misuse(BAD_ARGUMENT) for anything that is
    no
    session. Inside the block errors of missing tables and of failed transactions become these too.
    """
    connection = _connection(session, table)
    try:
        if _autocommits(connection):
            raise Misuse(
                Code.NO_TRANSACTION,
                "the session is in AUTOCOMMIT: a message would not stand and fall with your change",
                "use an engine or connection without isolation_level='AUTOCOMMIT'",
            )
        _need_tables(connection)
        yield connection
    except DBAPIError as problem:
        raise (plain(problem) or problem) from problem.__cause__
    except InvalidRequestError as problem:
        raise _unusable(problem) from problem


def plain(problem: DBAPIError) -> EscrowError | None:
    """Convert a database's error; None if it has no special meaning here (a deadlock, a lost connection, ...)."""
    if has_mark(problem, _NO_TABLE):
        return Misuse(Code.NO_TABLES)
    if has_mark(problem, _NO_COLUMN):
        return Misuse(Code.SCHEMA_VERSION)
    if has_mark(problem, _ABORTED):
        return Misuse(Code.NO_TRANSACTION, "an earlier statement of this transaction failed", "roll it back first")
    return None


def _connection(session: Any, table: sa.Table) -> sa.Connection:
    try:
        if isinstance(session, sa.Connection):
            if session.closed:
                raise Misuse(Code.NO_TRANSACTION, "the connection is closed")
            if not session.in_transaction():
                session.begin()
            return session
        if isinstance(session, Session | scoped_session):
            return session.connection(bind_arguments={"clause": table})
    except UnboundExecutionError as problem:
        hint = f"say binds={{..., outbox.tables.{table.name}: engine}}: the engine of the business tables"
        raise Misuse(Code.BAD_ARGUMENT, f"the session has no engine for {table.name}", hint) from problem
    except InvalidRequestError as problem:
        raise _unusable(problem) from problem
    hint = "a Session, a scoped_session or a Connection; what is to be awaited is in outbox.aio"
    raise Misuse(Code.BAD_ARGUMENT, f"{type(session).__name__} is not a session", hint)


def _unusable(problem: InvalidRequestError) -> Misuse:
    """For what SQLAlchemy itself says of ended, failed and closed transactions."""
    hint = "roll the session back, or open a new one"
    return Misuse(Code.NO_TRANSACTION, str(problem).partition(" (Background on")[0], hint)


def _autocommits(connection: sa.Connection) -> bool:
    """Return whether the database commits every statement by itself, by SQLAlchemy's setting or by the driver's own."""
    if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
        return True
    raw: Any = connection.connection.dbapi_connection
    if connection.dialect.name == "sqlite":
        manual = raw.isolation_level is None or getattr(raw, "autocommit", None) is True
        return manual and not connection.connection.driver_connection.in_transaction  # type: ignore[union-attr]
    asked = getattr(raw, "get_autocommit", None)
    return bool(asked() if asked is not None else getattr(raw, "autocommit", False))


def _need_tables(connection: sa.Connection) -> None:
    """Check the tables, once per engine and database schema."""
    known = _checked.setdefault(connection.engine.pool, set())
    name = translated(connection)
    if name not in known:
        check_schema(connection)
        known.add(name)
