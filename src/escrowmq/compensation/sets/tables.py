"""Tables of a set store in a SQL database, created on first use in the given database.

Units: times are ``BIGINT`` microseconds since 1970 (UTC); ids are 16 raw bytes. ``store`` is a number derived from the
name of the pair of sets (:func:`number_of`), so no look-up is needed, and no row can get a number with another meaning.
"""

from __future__ import annotations

import hashlib
from typing import Any

import sqlalchemy as sa

from escrowmq.outbox.tables import BIG, ID, NAME

metadata = sa.MetaData()


def number_of(name: str) -> int:
    """Return the number of the pair of sets ``name`` in rows: 64 bits of its digest, as a signed SQL integer."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)


def _table(name: str, *columns: sa.Column[Any]) -> sa.Table:
    # InnoDB even if the server's default engine is another; SQLite without row ids: the primary key is the table
    store = sa.Column("store", BIG, primary_key=True, autoincrement=False)
    return sa.Table(
        name, metadata, store, *columns, mysql_engine="InnoDB", mariadb_engine="InnoDB", sqlite_with_rowid=False
    )


def _id() -> sa.Column[bytes]:
    return sa.Column("id", ID, primary_key=True)


def _time(name: str) -> sa.Column[int]:
    return sa.Column(name, BIG, nullable=False)


def _run(*, primary_key: bool = False) -> sa.Column[str]:
    return sa.Column("run", sa.String(32), primary_key=primary_key, nullable=False)


set_store = _table(
    "escrow_set_store",
    sa.Column("name", NAME, nullable=False),
    sa.Column("token", sa.String(32), nullable=False),  # generated with the row; part of the epoch
)
half_set = _table("escrow_half_set", _id(), _time("announced_us"))
commit_set = _table("escrow_commit_set", _id(), _time("entered_us"))
set_run = _table("escrow_set_run", _run(primary_key=True), _time("leased_until_us"))  # by the database's clock
taken = _table("escrow_taken", _id(), _run(), _time("announced_us"))

sa.Index("escrow_half_set_by_time", half_set.c.store, half_set.c.announced_us, half_set.c.id)
sa.Index("escrow_commit_set_by_time", commit_set.c.store, commit_set.c.entered_us)
sa.Index("escrow_taken_by_run", taken.c.store, taken.c.run, taken.c.announced_us, taken.c.id)
sa.Index("escrow_taken_by_time", taken.c.store, taken.c.announced_us)
