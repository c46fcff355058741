"""Whether a SQLite database itself guarantees that an id is in one row only."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from escrowmq.outbox import engines
from escrowmq.pipeline.sql.tables import SqlRead


def is_unique(read: SqlRead, column: str) -> bool:
    """Whether no two rows of a read can have the same text in ``column``.

    A unique index or primary key says so, if all its values there are of one type, text or whole number.
    """
    with engines.opened(read.url) as engine, engine.connect() as connection:
        indexed = _unique_columns(connection, read.table, {column, *(name for name, _, _ in read.where)})
        if indexed is None:
            return False
        for name in indexed:  # 1 and '1', or two nulls, are different to an index
            value: sa.ColumnClause[Any] = sa.column(name)
            kinds = set(
                connection.scalars(sa.select(sa.func.typeof(value)).select_from(sa.table(read.table)).distinct())
            )
            if len(kinds) > 1 or not kinds <= {"text", "integer"}:
                return False
    return True


def _unique_columns(connection: sa.Connection, table: str, within: set[str]) -> list[str] | None:
    """The columns of a unique index, or a row id, that has no others than ``within``; None if there is none."""
    listed = 'SELECT name FROM pragma_index_list(?) WHERE "unique" AND NOT partial'
    for (index,) in connection.exec_driver_sql(listed, (table,)).all():
        columns = connection.exec_driver_sql("SELECT name FROM pragma_index_info(?)", (index,))
        names = [row[0] for row in columns]
        if within.issuperset(names):  # a null stands for an expression
            return names
    keys = "SELECT name, upper(type) FROM pragma_table_info(?) WHERE pk"
    found = connection.exec_driver_sql(keys, (table,)).all()
    if len(found) == 1 and found[0][1] == "INTEGER" and found[0][0] in within:
        return [found[0][0]]
    return None
