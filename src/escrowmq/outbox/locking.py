"""Engines on which a transaction that reads a row under lock can go on to write it."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from escrowmq.outbox import engines

SQLITE_PATIENCE = 30.0
"""Seconds that a transaction waits for a SQLite file's one lock."""


def open_locking(url: str, **options: Any) -> sa.Engine:
    """An engine for work under row locks. Raises as :func:`escrowmq.outbox.engines.open_engine`.

    PostgreSQL and MariaDB: READ COMMITTED, so that a read that waited for a lock sees what the lock's holder committed. SQLite has
    one lock per file, taken when the transaction begins (BEGIN IMMEDIATE, or the execution option ``begin``): a deferred one would
    fail between read and write.
    """
    if not url.startswith("sqlite"):
        return engines.open_engine(url, isolation_level="READ COMMITTED", **options)
    patience = {"timeout": SQLITE_PATIENCE, **options.pop("connect_args", {})}
    engine = engines.open_engine(url, connect_args=patience, **options)

    @sa.event.listens_for(engine, "connect")
    def on_connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself

    @sa.event.listens_for(engine, "begin")
    def on_begin(connection: sa.Connection) -> None:
        chosen = connection.get_execution_options()
        if chosen.get("isolation_level") != "AUTOCOMMIT":
            connection.exec_driver_sql(chosen.get("begin", "BEGIN IMMEDIATE"))

    return engine
