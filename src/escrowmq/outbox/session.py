"""Finds the caller's transaction in a session or connection, rejects one that cannot hold a row, explains database
errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, InvalidRequestError, UnboundExecutionError
from sqlalchemy.orm import Session, scoped_session

from escrowmq.errors import Code, Misuse
from escrowmq.outbox.dialects import has_mark
from escrowmq.outbox.migrations import check_schema, translated

AnySession = Session | scoped_session[Any] | sa.Connection
"""What ``_tx`` calls take: the ORM's session (scoped or not) or Core's connection."""

_checked: WeakKeyDictionary[sa.Pool, set[str | None]] = WeakKeyDictionary()
"""Database schemas whose tables are known to be of this version, by pool, which engines with other options share."""
_ABORTED = "an earlier statement of this transaction failed"
_MEANINGS: list[tuple[set[Any], Code, tuple[str, ...]]] = [
    ({"42P01", "3F000", 1146, "no such table"}, Code.NO_TABLES, ()),
    ({"42703", 1054, "has no column named", "no such column"}, Code.SCHEMA_VERSION, ()),
    ({"25P02"}, Code.NO_TRANSACTION, (_ABORTED, "roll it back first")),
]


@contextmanager
def transaction_of(session: AnySession, table: sa.Table) -> Iterator[sa.Connection]:
    """Context manager: the connection of the caller's transaction, for statements on ``table``. Flushes and commits
    nothing.

    Raises Misuse(NO_TRANSACTION) for AUTOCOMMIT, a closed connection, a failed or ended transaction; Misuse(NO_TABLES |
    SCHEMA_VERSION) if the tables are missing or of another version; Misuse(BAD_ARGUMENT) for another object. Errors of
    missing tables and of failed transactions inside the block become these too.
    """
    connection = _connection(session, table)
    try:
        if _autocommits(connection):
            text = "the session is in AUTOCOMMIT: a message would not stand and fall with your change"
            raise Misuse(Code.NO_TRANSACTION, text, "use an engine or connection without isolation_level='AUTOCOMMIT'")
        checked = _checked.setdefault(connection.engine.pool, set())
        if (name := translated(connection)) not in checked:
            check_schema(connection)
            checked.add(name)
        yield connection
    except DBAPIError as problem:
        raise explain(problem) from problem.__cause__
    except InvalidRequestError as problem:
        raise _unusable(problem) from problem


def explain(problem: DBAPIError) -> Exception:
    """Return the Misuse that a database's error means (no tables, another version, a failed transaction); the error
    itself if it means none (a deadlock, a lost connection, ...)."""
    return next((Misuse(code, *texts) for marks, code, texts in _MEANINGS if has_mark(problem, marks)), problem)


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
    """Return Misuse(NO_TRANSACTION) for SQLAlchemy's error of an ended, failed or closed transaction."""
    hint = "roll the session back, or open a new one"
    return Misuse(Code.NO_TRANSACTION, str(problem).partition(" (Background on")[0], hint)


def _autocommits(connection: sa.Connection) -> bool:
    """Return whether every statement is committed by itself, by a setting of SQLAlchemy or of the driver."""
    if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
        return True
    raw: Any = connection.connection.dbapi_connection
    if connection.dialect.name == "sqlite":
        manual = raw.isolation_level is None or getattr(raw, "autocommit", None) is True
        return manual and not connection.connection.driver_connection.in_transaction  # type: ignore[union-attr]
    read = getattr(raw, "get_autocommit", None)
    return bool(read() if read is not None else getattr(raw, "autocommit", False))
