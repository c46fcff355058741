"""Durability of a SQL database: whether it may lose commits, and how that is detected.

A store's epoch contains the indicator. A database restored from a backup has none: delete its row of
``escrow_set_store``, and the store has another epoch.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import sqlalchemy as sa

from escrowmq.errors import Code, Misuse
from escrowmq.outbox.dialects import insert_if_absent
from escrowmq.outbox.tables import BIG

BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Linux generates it at each start of the machine."""

_POSTGRESQL = """
SELECT substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)
    || CASE current_setting('fsync') WHEN 'on' THEN '' ELSE extract(epoch FROM pg_postmaster_start_time())::text END
"""
_SQLITE = "SELECT synchronous || journal_mode FROM pragma_synchronous, pragma_journal_mode"
_MYSQL = "SELECT @@innodb_flush_log_at_trx_commit"

set_start = sa.Table(
    "escrow_set_start",
    sa.MetaData(),
    sa.Column("one", BIG, primary_key=True, autoincrement=False),
    sa.Column("token", sa.String(16), nullable=False),
    mysql_engine="MEMORY",
    mariadb_engine="MEMORY",
)
"""MariaDB and MySQL: an in-memory table, which every start of the server empties."""


def commits_late(connection: sa.Connection, dialect: str) -> bool:
    """Decide whether commits of this connection return before they are durable, and a transaction can change that."""
    return dialect == "postgresql" and connection.exec_driver_sql("SHOW synchronous_commit").scalar() == "off"


def state_of(connection: sa.Connection, dialect: str) -> str:
    """Return a text that changes when this database may have lost commits; at most 60 characters. PostgreSQL: the
    timeline, because a promoted replica has another, and with ``fsync = off`` the time of its start. MariaDB and MySQL,
    if ``innodb_flush_log_at_trx_commit`` is not 1: the start of the server. SQLite, if ``synchronous`` is not FULL: the
    start of the machine. Raises Misuse(BAD_SETTING) if there is no such indicator."""
    if dialect == "postgresql":
        return f".{connection.exec_driver_sql(_POSTGRESQL).scalar()}"
    if dialect == "mysql":
        if str(connection.exec_driver_sql(_MYSQL).scalar()) == "1":
            return ""
        connection.execute(sa.schema.CreateTable(set_start, if_not_exists=True))
        connection.execute(insert_if_absent("mysql", set_start), {"one": 1, "token": secrets.token_hex(8)})
        return f".{connection.scalar(sa.select(set_start.c.token))}"
    if connection.exec_driver_sql(_SQLITE).scalar() not in ("0delete", "0wal", "1wal"):
        return ""
    if not BOOT.exists():
        text = "this SQLite may lose commits when the machine fails, and that cannot be detected here"
        raise Misuse(Code.BAD_SETTING, text, "PRAGMA synchronous = FULL")
    return f".{BOOT.read_text().strip()}"
