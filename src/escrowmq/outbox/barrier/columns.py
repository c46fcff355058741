"""Many transaction ids as one parameter of one statement: no Python object and no placeholder an id.

The ids travel as one run of bytes; the database cuts it into pieces of 16 itself, numbered by tables of the digits 0 to 15.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite

from escrowmq.outbox.tables import NAME, Reason, trans_barrier

COMMITTED, ROLLED_BACK = int(Reason.COMMITTED), int(Reason.ROLLED_BACK)

CHUNK = 16**3
"""Ids of one statement."""

_DIGITS = " UNION ALL ".join(f"SELECT {digit} AS digit" for digit in range(16))

Ids = npt.NDArray[np.bytes_]
"""Transaction ids as an array of ``S16``. Only ever compared and copied whole: what NumPy strips from the single item, zeros
at the end, is still there in its buffer."""


def as_ids(column: pa.FixedSizeBinaryArray) -> Ids:
    """The ids of a column without nulls."""
    raw = np.frombuffer(column.buffers()[1], np.uint8)[16 * column.offset : 16 * (column.offset + len(column))]
    return raw.view("S16")


def parameters(ids: Ids, **more: Any) -> dict[str, Any]:
    """What a statement over these ids takes."""
    return {"ids": ids.tobytes(), "count": len(ids), **more}


def reading(count: int) -> sa.Select[tuple[int, int]]:
    """Which of ``count`` ids have a row: (number of the id, reason). Parameters: ids, count, branch."""
    return _reading(_digits(count))


def inserting(dialect: str, count: int, *, strict: bool) -> sa.Insert:
    """Insert (id, branch, reason) for ``count`` ids; where there is such a row, nothing, or ``strict``: fail.
    Parameters: ids, count, branch_, reason_, now_us."""
    return _inserting(dialect, _digits(count), strict)


def reasons(rows: Any, count: int) -> npt.NDArray[np.uint8]:
    """The rows of :func:`reading` as a column: the reason of each id, 0 where it has no row."""
    found = np.zeros(count, np.uint8)
    if rows:
        number, reason = np.array([tuple(row) for row in rows], np.int64).T
        found[number] = reason
    return found


def _digits(count: int) -> int:
    return 1 if count <= 16 else 2 if count <= 256 else 3


@cache
def _asked(digits: int) -> sa.Subquery:
    """The ids with their numbers, as a table."""
    number = " + ".join(f"{16**place} * digit_{place}.digit" for place in range(digits))
    tables = " CROSS JOIN ".join(f"({_DIGITS}) digit_{place}" for place in range(digits))
    cut = f"SELECT {number} AS number, substr(:ids, 1 + 16 * ({number}), 16) AS transaction_id FROM {tables}"
    text = sa.text(f"{cut} WHERE {number} < :count")
    typed = text.bindparams(sa.bindparam("ids", type_=sa.LargeBinary), sa.bindparam("count", type_=sa.Integer))
    return typed.columns(sa.column("number", sa.Integer), sa.column("transaction_id", sa.LargeBinary)).subquery("asked")


@cache
def _reading(digits: int) -> sa.Select[tuple[int, int]]:
    asked, table = _asked(digits), trans_barrier
    same = table.c.transaction_id == asked.c.transaction_id
    found = sa.and_(same, table.c.branch == sa.bindparam("branch", type_=NAME))
    # the ids come first and each is looked up, however few rows the database believes the table to have
    read = sa.select(asked.c.number, table.c.reason).select_from(asked.join(table, found))
    return read.prefix_with("STRAIGHT_JOIN", dialect="mysql").prefix_with("STRAIGHT_JOIN", dialect="mariadb")


@cache
def _inserting(dialect: str, digits: int, strict: bool) -> sa.Insert:
    asked = _asked(digits)
    rows = sa.select(
        asked.c.transaction_id,
        sa.bindparam("branch_", type_=NAME),
        sa.bindparam("reason_", type_=sa.SmallInteger),
        sa.bindparam("now_us", type_=sa.BigInteger),
    ).where(asked.c.number >= 0)  # SQLite's grammar wants a WHERE before ON CONFLICT
    names = ["transaction_id", "branch", "reason", "decided_us"]
    ordered = rows.order_by(asked.c.number)  # everybody locks in the order of the ids: no deadlocks
    if strict:
        return sa.insert(trans_barrier).from_select(names, ordered)
    if dialect == "postgresql":
        return postgresql.insert(trans_barrier).from_select(names, ordered).on_conflict_do_nothing()
    if dialect == "sqlite":
        return sqlite.insert(trans_barrier).from_select(names, ordered).on_conflict_do_nothing()
    return mysql.insert(trans_barrier).prefix_with("IGNORE").from_select(names, ordered)
