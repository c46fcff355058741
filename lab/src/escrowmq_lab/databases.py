"""Databases of a run: SQLite files in a folder, or databases created on a real server and dropped with the run. For
examples and tests that need several databases at once. Only databases created here are dropped: an existing one is
rejected by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from escrowmq.errors import Code, Misuse
from escrowmq.outbox import engines
from escrowmq.outbox.engines import open_locking

_SERVERS = ("postgresql", "mysql", "mariadb")


@contextlib.contextmanager
def databases(
    names: Sequence[str], folder: Path, server: str | None = None, *, keep: bool = False
) -> Iterator[list[str]]:
    """Provide SQLAlchemy URLs of new databases called ``names``.

    ``server`` None: SQLite files ``folder/NAME.db``, which remain. Else the URL of any database of a PostgreSQL,
    MariaDB or MySQL server, as a user who may create databases; they are dropped at the end unless ``keep``.

    Raises Misuse(BAD_URL) for another kind of URL or an unreachable server, Misuse(BAD_ARGUMENT) if a name is taken.
    """
    if server is None:
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / f"{name}.db" for name in names]
        if taken := next((file for file in files if file.exists()), None):
            raise Misuse(Code.BAD_ARGUMENT, f"{taken} exists already", "name another folder, or remove it yourself")
        yield [f"sqlite:///{file}" for file in files]
        return
    with contextlib.ExitStack() as stack:
        admin = engines.open_engine(server, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        stack.callback(admin.dispose)
        if admin.dialect.name not in _SERVERS:
            hint = "postgresql://USER:PASSWORD@HOST/DATABASE or mariadb://...; without a URL SQLite files are used"
            raise Misuse(Code.BAD_URL, f"{admin.dialect.name} is not a database server", hint)
        for name in names:
            _create(admin, name)
            if not keep:
                stack.callback(_drop, admin, name)
        yield [admin.url.set(database=name).render_as_string(hide_password=False) for name in names]


def open_engine(url: str, **options: Any) -> sa.Engine:
    """Open an engine like :func:`escrowmq.outbox.engines.open_locking`, with durable commits of SQLite (WAL, FULL)."""
    engine = open_locking(url, **options)
    if engine.dialect.name == "sqlite":

        @sa.event.listens_for(engine, "connect")
        def on_connect(connection: Any, _record: Any) -> None:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")

    return engine


@contextlib.contextmanager
def snapshot(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Provide a connection whose reads all see one snapshot; it neither waits for locks nor holds any."""
    if engine.dialect.name == "sqlite":
        engine = engine.execution_options(begin="BEGIN")
    else:
        engine = engine.execution_options(isolation_level="REPEATABLE READ")
    with engine.begin() as connection:
        yield connection


def _create(admin: sa.Engine, name: str) -> None:
    try:
        with admin.connect() as connection:
            if name in _existing_names(connection):
                raise Misuse(
                    Code.BAD_ARGUMENT, f"the server has a database {name} already", "drop it yourself if it is old"
                )
            text = f"CREATE DATABASE {admin.dialect.identifier_preparer.quote(name)}"
            if admin.dialect.name != "postgresql":
                text += " CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
            connection.exec_driver_sql(text)
    except sa.exc.OperationalError as problem:
        what = f"cannot use the database server: {str(problem.orig).splitlines()[0]}"
        raise Misuse(Code.BAD_URL, what, "is it running, and may this user create databases?") from problem


def _existing_names(connection: sa.Connection) -> set[str]:
    table = "pg_catalog.pg_database" if connection.dialect.name == "postgresql" else "information_schema.schemata"
    column = "datname" if connection.dialect.name == "postgresql" else "schema_name"
    return {row[0] for row in connection.exec_driver_sql(f"SELECT {column} FROM {table}")}


def _drop(admin: sa.Engine, name: str) -> None:
    postgres = admin.dialect.name == "postgresql"
    with admin.connect() as connection:
        if not postgres:  # a session of a killed process may still hold a lock that would block the drop
            left = sa.text("SELECT id FROM information_schema.processlist WHERE db = :name")
            for thread in connection.scalars(left, {"name": name}).all():
                with contextlib.suppress(sa.exc.DBAPIError):
                    connection.exec_driver_sql(f"KILL {thread}")
        text = f"DROP DATABASE {admin.dialect.identifier_preparer.quote(name)}"
        connection.exec_driver_sql(text + (" WITH (FORCE)" if postgres else ""))
