"""The database steps of a process: statements that write, and commits, seen by the events of SQLAlchemy."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

_READS = re.compile(r"\s*(SELECT|PRAGMA|EXPLAIN|SHOW|SET|BEGIN|SAVEPOINT|RELEASE|ROLLBACK|VALUES)\b", re.IGNORECASE)
_WRITES = re.compile(r"\s*(INSERT(?: OR \w+)? INTO|UPDATE|DELETE FROM|CREATE TABLE|DROP TABLE)\s+([\w.\"`]+)", re.IGNORECASE)


class WatchedEngine:
    """An engine whose steps are those of a process, until :meth:`release`. ``step`` is called before each."""

    def __init__(self, engine: sa.Engine | AsyncEngine, step: Callable[[str], None]) -> None:
        self.engine = engine
        self._step = step
        self._sync = engine.sync_engine if isinstance(engine, AsyncEngine) else engine
        self._in_use: set[Any] = set()
        self._written: WeakKeyDictionary[sa.Connection, list[str]] = WeakKeyDictionary()  # in open transactions
        self._listeners = {
            "before_cursor_execute": self._on_statement,
            "commit": self._on_commit,
            "rollback": self._on_rollback,
            "checkout": lambda connection, *_: self._in_use.add(connection),
            "checkin": lambda connection, _: self._in_use.discard(connection),
        }
        for name, listener in self._listeners.items():
            event.listen(self._sync, name, listener)

    def _on_statement(self, connection: sa.Connection, cursor: Any, statement: str, *_: Any) -> None:
        if _READS.match(statement) is None:
            match = _WRITES.match(statement)
            text = " ".join(match.groups()) if match else " ".join(statement.split())[:40]
            self._step(text)
            self._written.setdefault(connection, []).append(text)

    def _on_commit(self, connection: sa.Connection) -> None:
        if written := self._written.pop(connection, None):
            self._step(f"COMMIT of {', '.join(dict.fromkeys(written))}")

    def _on_rollback(self, connection: sa.Connection) -> None:
        self._written.pop(connection, None)

    def release(self) -> None:
        """Drop the connections, whose transactions roll back, and watch no longer."""
        for name, listener in self._listeners.items():
            event.remove(self._sync, name, listener)
        if isinstance(self.engine, AsyncEngine):  # its own loop closes it
            return
        for connection in list(self._in_use):
            with suppress(Exception):  # closed already
                connection.close()
        self._sync.dispose()

    async def dispose(self) -> None:
        """Close the pool of an asynchronous engine."""
        if isinstance(self.engine, AsyncEngine):
            await self.engine.dispose()


def open_engine(path: str, options: dict[str, Any]) -> sa.Engine:
    """Return an engine on a SQLite file. Its commits are not synced: the machine of a test does not crash."""
    engine = sa.create_engine(f"sqlite:///{path}", **options)
    event.listen(engine, "connect", _do_not_sync)
    return engine


def open_async_engine(path: str, options: dict[str, Any]) -> AsyncEngine:
    """As :func:`open_engine`, for asyncio."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}", **options)
    event.listen(engine.sync_engine, "connect", _do_not_sync)
    return engine


def _do_not_sync(connection: Any, _: object) -> None:
    connection.execute("PRAGMA synchronous = OFF")


def rows_of(engine: sa.Engine, query: str) -> list[Any]:
    """Return the first column of a query."""
    with engine.connect() as connection:
        return list(connection.scalars(sa.text(query)))
