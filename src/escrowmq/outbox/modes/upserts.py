"""Insert-or-replace in the three dialects: one statement, many rows, no reading first."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite


def insert_or_replace(connection: sa.Connection, table: sa.Table, rows: list[dict[str, Any]]) -> None:
    """Insert rows; one whose primary key is there takes that row's place."""
    keys = [column.name for column in table.primary_key]
    if connection.dialect.name in ("mysql", "mariadb"):
        insert = mysql.insert(table)
        connection.execute(insert.on_duplicate_key_update(_others(table, insert.inserted)), rows)
    elif connection.dialect.name == "postgresql":
        pg = postgresql.insert(table)
        connection.execute(pg.on_conflict_do_update(index_elements=keys, set_=_others(table, pg.excluded)), rows)
    else:
        lite = sqlite.insert(table)
        connection.execute(lite.on_conflict_do_update(index_elements=keys, set_=_others(table, lite.excluded)), rows)


def insert_or_ignore(connection: sa.Connection, table: sa.Table, rows: list[dict[str, Any]]) -> None:
    """Insert rows; one whose primary key is there is passed over."""
    if connection.dialect.name in ("mysql", "mariadb"):
        insert = mysql.insert(table)
        first = next(iter(table.primary_key))
        connection.execute(insert.on_duplicate_key_update({first.name: first}), rows)  # changes nothing
    elif connection.dialect.name == "postgresql":
        connection.execute(postgresql.insert(table).on_conflict_do_nothing(), rows)
    else:
        connection.execute(sqlite.insert(table).on_conflict_do_nothing(), rows)


def _others(table: sa.Table, given: Any) -> dict[str, Any]:
    return {column.name: given[column.name] for column in table.columns if not column.primary_key}
