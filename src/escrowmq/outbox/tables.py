"""The tables, for SQLite, PostgreSQL and MariaDB/MySQL alike. ``migrations.py`` makes and upgrades them.

Units: times are ``BIGINT`` microseconds since 1970 (UTC); ids are 16 raw bytes. Names are fixed; another PostgreSQL
schema is chosen the SQLAlchemy way (``schema_translate_map``, or ``search_path``).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql

SCHEMA_VERSION = 4
"""The version of this file; stored in ``trans_schema``."""

LANES = 64
"""Messages are spread over this many lanes by their key (stable hash; without a key by turns). A lane has one relay at
a time, which is how several relays at once keep the order of every key.
"""

CHANNEL = "escrowmq_outbox"
"""PostgreSQL's channel on which a commit with new messages wakes the relays (``LISTEN``, ``NOTIFY``); the payload is
empty.
"""

ID = (
    sa.LargeBinary(16).with_variant(mysql.BINARY(16), "mysql", "mariadb").with_variant(postgresql.BYTEA(), "postgresql")
)
BODY = sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")
BIG = sa.BigInteger()
COUNTED = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
"""Of a primary key that the database counts up; SQLite does so for INTEGER only."""
NAME = sa.String(127).with_variant(mysql.VARCHAR(127, charset="utf8mb4", collation="utf8mb4_bin"), "mysql", "mariadb")
TEXT = sa.Text().with_variant(mysql.MEDIUMTEXT(charset="utf8mb4", collation="utf8mb4_bin"), "mysql", "mariadb")
KEY = sa.Text().with_variant(mysql.VARCHAR(1024, charset="utf8mb4", collation="utf8mb4_bin"), "mysql", "mariadb")


PLACE = "a database"
"""What keeps the record of acts: the beginning of its chain of hashes is made of this."""


class State(IntEnum):
    """Where a row of ``trans_message`` stands."""

    PENDING = 0
    """To be sent at once (``due_us`` is 0, or past)."""
    SENT = 1
    """The target's receipt is durable; kept for the consumer's callback, or for ``keep``."""
    DONE = 2
    """The consumer's callback came."""
    WAITING = 3
    """Attempts ran out: a person decides."""
    DISCARDED = 4
    """A person decided that it is not to be sent."""
    RETRYING = 5
    """Refused, or the target was away; the relay tries again at ``due_us``. Holds later rows of its key."""
    HELD = 6
    """Behind a RETRYING or WAITING row of its key; the relay makes it PENDING again when that one has gone."""

    # A callback can be quicker than the relay's own mark, so a row is marked SENT only WHERE it is still PENDING.


class Reason(IntEnum):
    """The meaning of a row of ``trans_barrier``."""

    COMMITTED = 1
    ROLLED_BACK = 2


metadata = sa.MetaData()


def _table(name: str, *columns: sa.Column[Any]) -> sa.Table:
    # InnoDB whatever the server's default engine is: without transactions there is no outbox
    return sa.Table(name, metadata, *columns, mysql_engine="InnoDB", mariadb_engine="InnoDB")


def content() -> list[sa.Column[Any]]:
    """Return the columns of a message; properties are a JSON object of texts."""
    body = sa.Column("body", BODY, nullable=False)
    texts = (sa.Column("key", KEY), sa.Column("tag", KEY), sa.Column("properties", TEXT))
    return [sa.Column("topic", NAME, nullable=False), *texts, body]


trans_schema = _table(
    "trans_schema",
    sa.Column("one", sa.SmallInteger, primary_key=True, autoincrement=False),  # always 1: the table has one row
    sa.Column("version", sa.Integer, nullable=False),
)

trans_message = _table(
    "trans_message",
    sa.Column("seq", COUNTED, primary_key=True, autoincrement=True),  # taken before the commit: never page by it
    sa.Column("id", ID, nullable=False, unique=True),
    sa.Column("lane", sa.SmallInteger, nullable=False),
    sa.Column("state", sa.SmallInteger, nullable=False),
    *content(),
    sa.Column("delay_us", BIG, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("due_us", BIG, nullable=False),  # 0: at once
    sa.Column("created_us", BIG, nullable=False),
    sa.Column("sent_us", BIG),
    sa.Column("done_us", BIG),
    sa.Column("error", TEXT),
)

trans_lane = _table(
    "trans_lane",
    sa.Column("lane", sa.SmallInteger, primary_key=True, autoincrement=False),
    sa.Column("owner", NAME),
    sa.Column("epoch", BIG, nullable=False),
    sa.Column("leased_until_us", BIG, nullable=False),  # by the database's clock
)

trans_relay = _table(
    "trans_relay",
    sa.Column("owner", NAME, primary_key=True),
    # by the database's clock; who is alive gets a fair share of the lanes
    sa.Column("alive_until_us", BIG, nullable=False),
)

trans_recv_log = _table(
    "trans_recv_log",
    sa.Column("consumer_group", NAME, primary_key=True),
    sa.Column("message_id", ID, primary_key=True),
    sa.Column("seen_us", BIG, nullable=False),
    sa.Column("topic", NAME),  # null: claimed by its id alone, so for every topic (all marks of version 1)
)

trans_recv_offset = _table(
    "trans_recv_offset",
    sa.Column("consumer_group", NAME, primary_key=True),
    sa.Column("topic", NAME, primary_key=True),
    sa.Column("shard", BIG, primary_key=True, autoincrement=False),
    sa.Column("queue", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("stride", sa.Integer, primary_key=True, autoincrement=False),  # 1: the whole queue
    sa.Column("part", sa.Integer, primary_key=True, autoincrement=False),  # offsets with offset % stride = part
    sa.Column("next_offset", BIG, nullable=False),  # always the next one, never the last
    sa.Column("epoch", BIG, nullable=False),  # of the consumer that may move it
    sa.Column("owner", NAME),  # that consumer's name; null: let go
)

trans_barrier = _table(
    "trans_barrier",
    sa.Column("transaction_id", ID, primary_key=True),
    sa.Column("branch", NAME, primary_key=True),
    sa.Column("reason", sa.SmallInteger, nullable=False),
    sa.Column("decided_us", BIG, nullable=False),
)

trans_prepared = _table(
    "trans_prepared",
    sa.Column("consumer_group", NAME, primary_key=True),
    sa.Column("message_id", ID, primary_key=True),
    *content(),
    sa.Column("prepared_us", BIG, nullable=False),
)

trans_driven = _table(
    "trans_driven",
    sa.Column("id", ID, primary_key=True),
    sa.Column("producer_group", NAME, nullable=False),
    sa.Column("state", sa.SmallInteger, nullable=False),  # outbox/modes/driven.py has the table of states
    sa.Column("shard", BIG),  # of the broker that took the prepare: a transaction never moves
    sa.Column("transaction_id", ID),
    *content(),
    sa.Column("delay_us", BIG, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("created_us", BIG, nullable=False),
    sa.Column(
        "was", sa.SmallInteger
    ),  # of a STUCK row: the state that it came from; null: tables of version 3 did not say
    sa.Column("reason", NAME),  # of a STUCK row: the code that the broker answered
)

trans_compensation = _table(
    "trans_compensation",
    sa.Column("name", NAME, primary_key=True),
    sa.Column("version", BIG, nullable=False),  # counts the changes: each is a compare and set on it
    sa.Column("epoch", NAME),  # of the set store, when it was last whole; null: it was never seen
    sa.Column(
        "settled_us", BIG, nullable=False
    ),  # by the brokers' clock; compensation/journal.py says what it promises
    sa.Column("suspended_us", BIG),  # by the database's clock; null: it is not suspended
    sa.Column("reason", TEXT),
    sa.Column("changed_us", BIG, nullable=False),
)

trans_compensation_case = _table(
    "trans_compensation_case",
    sa.Column("name", NAME, primary_key=True),
    sa.Column("message_id", ID, primary_key=True),
    sa.Column("state", sa.SmallInteger, nullable=False),  # compensation/cases.py has the states
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("first_us", BIG, nullable=False),
    sa.Column("changed_us", BIG, nullable=False),
    sa.Column("reason", TEXT, nullable=False),
    sa.Column("notes", TEXT),  # a line for each operator action, by versions of escrowmq before the record of acts
)

trans_act = _table(
    "trans_act",
    # Whoever may only INSERT and SELECT here can add to the record, and change nothing of it.
    sa.Column("number", BIG, primary_key=True, autoincrement=False),
    sa.Column("record", TEXT, nullable=False),  # a line as acts/chain.py has it, without its end
)

trans_act_head = _table(
    "trans_act_head",
    sa.Column("one", sa.SmallInteger, primary_key=True, autoincrement=False),  # always 1: the table has one row
    sa.Column("number", BIG, nullable=False),  # of the last record; 0: there is none yet
    sa.Column("hash", NAME, nullable=False),  # of the last record
)


def state_is(state: State) -> sa.ColumnElement[bool]:
    """For rows of ``trans_message``, in literals: a partial index is used only if the statement itself says that it
    suffices."""
    same = trans_message.c.state == sa.literal_column(str(state.value))
    if state < State.WAITING:
        return same
    return sa.and_(trans_message.c.state >= sa.literal_column(str(State.WAITING.value)), same)


def _on(*names: str) -> Any:
    return lambda ddl, target, bind, dialect, **_: dialect.name in names


def _partial(name: str, only: sa.ColumnElement[bool], *columns: sa.Column[Any]) -> sa.Index:
    """Return an index of the rows for which ``only`` holds, in databases that can."""
    return sa.Index(name, *columns, postgresql_where=only, sqlite_where=only)


_m = trans_message.c
# What the relay puts aside (RETRYING, HELD, WAITING) and what it keeps (SENT, DONE) must not make its reads of PENDING
# rows slower.
_pending = _partial("trans_message_pending", _m.state == State.PENDING.value, _m.lane, _m.seq)
_aside = _partial("trans_message_aside", _m.state >= State.WAITING.value, _m.state, _m.lane, _m.due_us)
_pending.ddl_if(callable_=_on("postgresql", "sqlite"))
_aside.ddl_if(callable_=_on("postgresql", "sqlite"))
_partial("trans_message_kept", _m.sent_us.is_not(None), _m.state, _m.sent_us)
sa.Index("trans_message_by_state", _m.state, _m.lane, _m.seq).ddl_if(callable_=_on("mysql", "mariadb"))
# By state in the order of the table, as a person turns the pages: the statement is answered from the index alone,
# whatever the database believes of the distribution of the states (before ANALYZE, PostgreSQL believes that few rows
# are in any).
_listed = _partial("trans_message_listed", _m.state >= State.WAITING.value, _m.state, _m.seq)
_listed.ddl_if(callable_=_on("postgresql", "sqlite"))
sa.Index("trans_recv_log_by_time", trans_recv_log.c.seen_us)  # what is purged is at its left end
sa.Index("trans_barrier_by_time", trans_barrier.c.decided_us)  # likewise
sa.Index("trans_driven_by_group", trans_driven.c.producer_group, trans_driven.c.state)
sa.Index("trans_driven_by_state", trans_driven.c.state, trans_driven.c.id, trans_driven.c.producer_group)
_case = trans_compensation_case.c
sa.Index("trans_compensation_case_by_state", _case.name, _case.state, _case.changed_us)
sa.Index("trans_compensation_case_listed", _case.name, _case.state, _case.message_id)
