"""The database steps of a process: statements that write, and commits, seen by the events of SQLAlchemy."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary, ref

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.util import greenlet_spawn

_READS = re.compile(r"\s*(SELECT|PRAGMA|EXPLAIN|SHOW|SET|BEGIN|SAVEPOINT|RELEASE|ROLLBACK|VALUES)\b", re.I)
_WRITES = re.compile(r"\s*(INSERT(?: OR \w+)? INTO|UPDATE|DELETE FROM|(?:CREATE|DROP) TABLE)\s+([\w.\"`]+)", re.I)

_watched: WeakKeyDictionary[sa.Engine, WatchedEngine] = WeakKeyDictionary()
"""Who watches an engine now."""


class WatchedEngine:
    """An engine whose steps are those of a process, until :meth:`release`. ``step`` is called before each."""

    def __init__(self, engine: sa.Engine | AsyncEngine, step: Callable[[str], None]) -> None:
        self.is_async = isinstance(engine, AsyncEngine)
        self._step = step
        self._sync = engine.sync_engine if isinstance(engine, AsyncEngine) else engine
        self._in_use: dict[Any, Any] = {}  # a weak reference to the connection, by its entry of the pool
        self._written: WeakKeyDictionary[sa.Connection, list[str]] = WeakKeyDictionary()  # in open transactions
        self._listeners: dict[str, Callable[..., Any]] = {
            "before_cursor_execute": self._on_statement,
            "commit": self._on_commit,
            "prepare_twophase": lambda connection, _: self._step("PREPARE TRANSACTION"),
            "commit_twophase": lambda connection, *_: self._on_commit(connection),
            "rollback": self._on_rollback,
            "checkout": lambda _, entry, connection: self._in_use.update({entry: ref(connection)}),
            "checkin": lambda _, entry: self._in_use.pop(entry, None),
        }
        if (before := _watched.get(self._sync)) is not None:
            before._ignore()
        _watched[self._sync] = self
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
        for connection in self._left():
            with suppress(sa.exc.SQLAlchemyError):
                connection.invalidate()
        self._sync.dispose()
        self._ignore()

    async def arelease(self) -> None:
        """As :meth:`release`, for an asynchronous engine, on its event loop."""
        for connection in self._left():
            with suppress(sa.exc.SQLAlchemyError):
                await greenlet_spawn(connection.invalidate)
        await greenlet_spawn(self._sync.dispose)
        self._ignore()

    def _left(self) -> list[Any]:
        """Return the connections that the process has not returned to the pool."""
        return [connection for reference in [*self._in_use.values()] if (connection := reference()) is not None]

    def _ignore(self) -> None:
        for name, listener in self._listeners.items():
            if event.contains(self._sync, name, listener):
                event.remove(self._sync, name, listener)


def open_engine(path: str, options: dict[str, Any]) -> sa.Engine:
    """Return an engine on a SQLite file. Its commits are not synced, because the machine of a test does not crash."""
    engine = sa.create_engine(f"sqlite:///{path}", **options)
    event.listen(engine, "connect", _do_not_sync)
    return engine


def open_async_engine(path: str, options: dict[str, Any]) -> AsyncEngine:
    """As :func:`open_engine`, for asyncio."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}", **options)
    event.listen(engine.sync_engine, "connect", _do_not_sync)
    return engine


def _do_not_sync(connection: Any, _: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous = OFF")
    cursor.execute("PRAGMA journal_mode = MEMORY")
    cursor.close()


def rows_of(engine: sa.Engine, query: str) -> list[Any]:
    """Return the first column of a query."""
    with engine.connect() as connection:
        return list(connection.scalars(sa.text(query)))
