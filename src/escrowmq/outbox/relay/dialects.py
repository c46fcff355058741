"""Where SQLite, PostgreSQL and MariaDB/MySQL differ for the relay."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from escrowmq.errors import Code, Misuse

_NOW = {
    "postgresql": "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS BIGINT)",
    "mysql": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))",
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000",
}


class Dialect:
    """The differences, for one engine. Raises Misuse(BAD_ARGUMENT) for what is no engine of a known database."""

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
        """A transaction of several statements, each of which sees what was committed before it. SQLite's holds the one
        lock from its start: one that begins with a read would fail at its first write."""
        with self._several.begin() as connection:
            if self.name == "sqlite" and not connection.connection.driver_connection.in_transaction:  # type: ignore[union-attr]
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            yield connection

    def among(self, column: sa.ColumnElement[Any], name: str) -> sa.ColumnElement[bool]:
        """``column`` is one of the whole numbers that are bound as ``name``, by :meth:`numbers`."""
        if self.name == "postgresql":
            return column == sa.any_(sa.bindparam(name, type_=postgresql.ARRAY(sa.BigInteger)))
        if self.name == "mysql":
            return column.in_(sa.bindparam(name, expanding=True, literal_execute=True, type_=sa.BigInteger))
        values = sa.func.json_each(sa.bindparam(name, type_=sa.Text)).table_valued("value")
        return column.in_(sa.select(values.c.value))

    def numbers(self, values: Sequence[int]) -> Any:
        """Whole numbers as :meth:`among` takes them."""
        return json.dumps(list(values)) if self.name == "sqlite" else list(values)
