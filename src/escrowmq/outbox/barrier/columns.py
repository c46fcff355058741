"""Many transaction ids as one parameter of one statement, without a Python object and a placeholder per id.

The ids travel as consecutive bytes. The database cuts them into pieces of 16, numbered by tables of the digits 0 to 15.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import sqlalchemy as sa

from escrowmq.message.ids import records
from escrowmq.outbox.dialects import database_now_us, insert_if_absent
from escrowmq.outbox.tables import NAME, Reason, trans_barrier

COMMITTED, ROLLED_BACK = int(Reason.COMMITTED), int(Reason.ROLLED_BACK)

CHUNK = 16**3
"""Ids of one statement."""
_DIGITS = " UNION ALL ".join(f"SELECT {digit} AS digit" for digit in range(16))

Ids = npt.NDArray[np.bytes_]
"""Transaction ids as an array of ``S16``, only compared and copied whole: NumPy strips trailing zeros of an item."""


def as_ids(column: pa.FixedSizeBinaryArray) -> Ids:
    """Convert a column of ids without nulls to a NumPy array."""
    return records(column, "S16")


def read(connection: sa.Connection, ids: Ids, branch: str) -> npt.NDArray[np.uint8]:
    """Return the :class:`~escrowmq.outbox.tables.Reason` of the barrier row of each id (0: no row), as the connection
    sees it."""
    dialect = connection.dialect.name
    query = _make_query(_uses_hex(dialect), _digits(ids))
    rows = connection.execute(query, {**_encode_packed(dialect, ids), "branch": branch}).all()
    found = np.zeros(len(ids), np.uint8)
    if rows:
        number, reason = np.array([tuple(row) for row in rows], np.int64).T
        found[number] = reason
    return found


def insert(connection: sa.Connection, ids: Ids, branch: str, reason: int, *, strict: bool) -> None:
    """Insert a barrier row with ``reason`` for each id. ``strict``: an existing row is an IntegrityError; else it
    stays."""
    dialect = connection.dialect.name
    now_us = database_now_us(connection)
    given = {**_encode_packed(dialect, ids), "branch_": branch, "reason_": reason, "now_us": now_us}
    connection.execute(_make_insert(dialect, _digits(ids), strict), given)


def _encode_packed(dialect: str, ids: Ids) -> dict[str, Any]:
    raw = ids.tobytes()
    return {"ids": raw.hex() if _uses_hex(dialect) else raw, "count": len(ids)}


def _uses_hex(dialect: str) -> bool:
    """Return whether the ids travel as text. Drivers of MariaDB and MySQL write bytes into the statement as text of the
    connection's character set, where SUBSTR would count two bytes that form a character as one."""
    return dialect in ("mysql", "mariadb")


def _digits(ids: Ids) -> int:
    return 1 if len(ids) <= 16 else 2 if len(ids) <= 256 else 3


@cache
def _make_id_table(hexed: bool, digits: int) -> sa.Subquery:
    """Return a subquery that cuts the bound bytes ``:ids`` (``hexed``: as hexadecimal digits) into a table of number
    and id. ``digits``: hexadecimal digits of the highest number."""
    number = " + ".join(f"{16**place} * digit_{place}.digit" for place in range(digits))
    tables = " CROSS JOIN ".join(f"({_DIGITS}) digit_{place}" for place in range(digits))
    raw = ":ids"
    if hexed:  # decoded once, in a table of one row; an expression would be evaluated for each id
        raw, tables = "given.raw", f"(SELECT unhex(:ids) AS raw) given CROSS JOIN {tables}"
    cut = f"substr({raw}, 1 + 16 * ({number}), 16)"
    text = sa.text(f"SELECT {number} AS number, {cut} AS transaction_id FROM {tables} WHERE {number} < :count")
    kind = sa.String() if hexed else sa.LargeBinary()
    typed = text.bindparams(sa.bindparam("ids", type_=kind), sa.bindparam("count", type_=sa.Integer))
    return typed.columns(sa.column("number", sa.Integer), sa.column("transaction_id", sa.LargeBinary)).subquery(
        "given_ids"
    )


@cache
def _make_query(hexed: bool, digits: int) -> sa.Select[tuple[int, int]]:
    ids, table = _make_id_table(hexed, digits), trans_barrier
    same = table.c.transaction_id == ids.c.transaction_id
    found = sa.and_(same, table.c.branch == sa.bindparam("branch", type_=NAME))
    # search for each id, however few rows the database believes the table to have
    rows = sa.select(ids.c.number, table.c.reason).select_from(ids.join(table, found))
    return rows.prefix_with("STRAIGHT_JOIN", dialect="mysql").prefix_with("STRAIGHT_JOIN", dialect="mariadb")


@cache
def _make_insert(dialect: str, digits: int, strict: bool) -> sa.Insert:
    ids = _make_id_table(_uses_hex(dialect), digits)
    rows = sa.select(
        ids.c.transaction_id,
        sa.bindparam("branch_", type_=NAME),
        sa.bindparam("reason_", type_=sa.SmallInteger),
        sa.bindparam("now_us", type_=sa.BigInteger),
    ).where(ids.c.number >= 0)  # SQLite's grammar wants a WHERE before ON CONFLICT
    names = ["transaction_id", "branch", "reason", "decided_us"]
    ordered = rows.order_by(ids.c.number)  # all callers lock in the order of the ids: no deadlocks
    insert = sa.insert(trans_barrier) if strict else insert_if_absent(dialect, trans_barrier)
    return insert.from_select(names, ordered)
