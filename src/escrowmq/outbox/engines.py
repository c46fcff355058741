"""Creates SQLAlchemy engines from user-supplied URLs, with default drivers and helpful error messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, OperationalError

from escrowmq.errors import Code, Misuse, Unknown
from escrowmq.platform.extras import EXTRAS, missing_package
from escrowmq.platform.listening import shown_address

_POSTGRESQL = "postgresql+psycopg"
_DRIVERS = {"postgresql": _POSTGRESQL, "postgres": _POSTGRESQL, "mysql": "mysql+pymysql", "mariadb": "mariadb+pymysql"}
SQLITE_PATIENCE = 30.0
"""Timeout (s) for the lock of a SQLite file."""


def open_engine(url: str, **options: Any) -> sa.Engine:
    """Return an engine for a database URL such as ``sqlite:///shop.db`` or ``postgresql://user:password@host/shop``.

    Raises Misuse(BAD_URL) for an invalid URL, Misuse(MISSING_PACKAGE) if the driver is not installed.
    """
    hint = "such as sqlite:///shop.db, postgresql://user@host/shop or mysql://user@host/shop"
    try:
        parsed = sa.make_url(url)
    except ArgumentError:
        # not chained: its text may contain a password
        raise Misuse(Code.BAD_URL, f"{shown_address(url)!r} is not a database URL", hint) from None
    parsed = parsed.set(drivername=_DRIVERS.get(parsed.drivername, parsed.drivername))
    try:
        engine = sa.create_engine(parsed, **options)
    except NoSuchModuleError:
        raise Misuse(Code.BAD_URL, f"no such kind of database: {parsed.drivername}", hint) from None
    except ModuleNotFoundError as problem:
        extra = EXTRAS.get(problem.name or "", "outbox")
        raise missing_package(problem.name or "", "the database", extra) from problem
    if engine.dialect.is_async:
        raise Misuse(Code.BAD_URL, f"{parsed.drivername} is an asynchronous driver", f"use {engine.dialect.name}://")
    return engine


@contextmanager
def opened(url: str, *, make: bool = False) -> Iterator[sa.Engine]:
    """Context manager: the engine of :func:`open_engine` for a command, disposed at the end. A database that is away is
    Unknown(DISCONNECTED), without its password. A missing SQLite file, which SQLite would create, is Misuse(NO_TABLES)
    unless ``make``."""
    engine = open_engine(url)
    file = engine.url.database if engine.dialect.name == "sqlite" else None
    if file and file != ":memory:" and not file.startswith("file:") and not make and not Path(file).exists():
        raise Misuse(Code.NO_TABLES, f"there is no database {file}")
    try:
        yield engine
    except OperationalError as problem:
        text = f"{shown_address(engine.url.render_as_string(hide_password=False))}: {problem.orig}"
        raise Unknown(Code.DISCONNECTED, text, "is the database there, and the URL right?") from None
    finally:
        engine.dispose()


def open_locking(url: str, **options: Any) -> sa.Engine:
    """Return an engine for work under row locks. Raises as :func:`open_engine`.

    PostgreSQL and MariaDB: READ COMMITTED, so that a read that waited for a lock sees the commit of its holder. SQLite
    has one lock per file, taken when the transaction begins (BEGIN IMMEDIATE, or the execution option ``begin``): a
    deferred one would fail between read and write.
    """
    if not url.startswith("sqlite"):
        return open_engine(url, isolation_level="READ COMMITTED", **options)
    patience = {"timeout": SQLITE_PATIENCE, **options.pop("connect_args", {})}
    engine = open_engine(url, connect_args=patience, **options)

    @sa.event.listens_for(engine, "connect")
    def on_connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself

    @sa.event.listens_for(engine, "begin")
    def on_begin(connection: sa.Connection) -> None:
        chosen = connection.get_execution_options()
        if chosen.get("isolation_level") != "AUTOCOMMIT":
            connection.exec_driver_sql(chosen.get("begin", "BEGIN IMMEDIATE"))

    return engine
