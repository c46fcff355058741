"""The tables, for SQLite, PostgreSQL and MariaDB/MySQL alike. ``migrations.py`` creates and upgrades them.

Units: times are ``BIGINT`` microseconds since 1970 (UTC); ids are 16 raw bytes. Names are fixed; SQLAlchemy's
``schema_translate_map``, or ``search_path``, chooses another PostgreSQL schema.
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
a time, so that several relays keep the order of every key."""
CHANNEL = "escrowmq_outbox"
"""PostgreSQL's channel on which a commit with new messages wakes the relays (``LISTEN``, ``NOTIFY``)."""
PLACE = "a database"
"""The origin of the hash chain of operator actions in a database."""


ID = (
    sa.LargeBinary(16).with_variant(mysql.BINARY(16), "mysql", "mariadb").with_variant(postgresql.BYTEA(), "postgresql")
)
BODY = sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")
BIG = sa.BigInteger()
COUNTED = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
"""A primary key that the database counts up; SQLite does so for INTEGER only."""
_BINARY: Any = {"charset": "utf8mb4", "collation": "utf8mb4_bin"}
NAME = sa.String(127).with_variant(mysql.VARCHAR(127, **_BINARY), "mysql", "mariadb")
TEXT = sa.Text().with_variant(mysql.MEDIUMTEXT(**_BINARY), "mysql", "mariadb")
KEY = sa.Text().with_variant(mysql.VARCHAR(1024, **_BINARY), "mysql", "mariadb")


class State(IntEnum):
    """The state of a row of ``trans_message``."""

    PENDING = 0
    """To be sent at once (``due_us`` is 0, or past)."""
    SENT = 1
    """The target's receipt is durable; kept for the consumer's callback, or for ``keep``. Only a PENDING row becomes
    SENT, because a callback may precede the relay's own mark."""
    DONE = 2
    """The consumer's callback arrived."""
    WAITING = 3
    """The attempts are used up: an operator decides."""
    DISCARDED = 4
    """An operator decided not to send it."""
    RETRYING = 5
    """Refused, or the target was away; the relay tries again at ``due_us``. Holds later rows of its key."""
    HELD = 6
    """Behind a RETRYING or WAITING row of its key; the relay makes it PENDING again when that one has gone."""


class Reason(IntEnum):
    """The meaning of a row of ``trans_barrier``."""

    COMMITTED = 1
    ROLLED_BACK = 2


metadata = sa.MetaData()
ENGINE: Any = {"mysql_engine": "InnoDB", "mariadb_engine": "InnoDB"}
"""Whatever the server's default engine is: an outbox needs transactions."""


def _table(name: str, *columns: sa.Column[Any]) -> sa.Table:
    return sa.Table(name, metadata, *columns, **ENGINE)


def _primary_key(**kinds: Any) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, primary_key=True, autoincrement=False) for name, kind in kinds.items()]


def _not_null(**kinds: Any) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=False) for name, kind in kinds.items()]


def _nullable(**kinds: Any) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind) for name, kind in kinds.items()]


def content() -> list[sa.Column[Any]]:
    """Return new columns for a message (topic, key, tag, properties, body); properties are a JSON object of texts."""
    return [*_not_null(topic=NAME), *_nullable(key=KEY, tag=KEY, properties=TEXT), *_not_null(body=BODY)]


SMALL, INTEGER = sa.SmallInteger, sa.Integer
trans_schema = _table("trans_schema", *_primary_key(one=SMALL), *_not_null(version=INTEGER))  # one row, one = 1
trans_message = _table(
    "trans_message",
    sa.Column("seq", COUNTED, primary_key=True, autoincrement=True),  # taken before the commit: never page by it
    sa.Column("id", ID, nullable=False, unique=True),
    *_not_null(lane=SMALL, state=SMALL),
    *content(),
    *_not_null(delay_us=BIG, attempts=INTEGER, due_us=BIG, created_us=BIG),  # due_us 0: at once
    *_nullable(sent_us=BIG, done_us=BIG, error=TEXT),
)
trans_lane = _table(
    "trans_lane",
    *_primary_key(lane=SMALL),
    *_nullable(owner=NAME),
    *_not_null(epoch=BIG, leased_until_us=BIG),  # by the database's clock
)
trans_relay = _table(
    "trans_relay",
    *_primary_key(owner=NAME),
    *_not_null(alive_until_us=BIG),  # by the database's clock; living owners share the lanes
)
trans_recv_log = _table(
    "trans_recv_log",
    *_primary_key(consumer_group=NAME, message_id=ID),
    *_not_null(seen_us=BIG),
    *_nullable(topic=NAME),  # null: claimed by its id alone, so for every topic (all marks of version 1)
)
trans_recv_offset = _table(
    "trans_recv_offset",
    *_primary_key(consumer_group=NAME, topic=NAME, shard=BIG, queue=INTEGER),
    *_primary_key(stride=INTEGER, part=INTEGER),  # offsets with offset % stride = part; stride 1: the whole queue
    *_not_null(next_offset=BIG),  # always the next one, never the last
    *_not_null(epoch=BIG),  # of the consumer that may move it
    *_nullable(owner=NAME),  # that consumer's name; null: released
)
trans_barrier = _table(
    "trans_barrier", *_primary_key(transaction_id=ID, branch=NAME), *_not_null(reason=SMALL, decided_us=BIG)
)
trans_prepared = _table(
    "trans_prepared", *_primary_key(consumer_group=NAME, message_id=ID), *content(), *_not_null(prepared_us=BIG)
)
trans_driven = _table(
    "trans_driven",
    *_primary_key(id=ID),
    *_not_null(producer_group=NAME, state=SMALL),  # outbox/modes/driving.py has the table of states
    *_nullable(shard=BIG, transaction_id=ID),  # of the broker that took the prepare: a transaction never moves
    *content(),
    *_not_null(delay_us=BIG, attempts=INTEGER, created_us=BIG),
    # of a STUCK row: its state before (null: tables of version 3 did not say), and the code that the broker answered
    *_nullable(was=SMALL, reason=NAME),
)
trans_compensation = _table(
    "trans_compensation",
    *_primary_key(name=NAME),
    *_not_null(version=BIG),  # counts the changes: each is a compare and set on it
    *_nullable(epoch=NAME),  # of the set store, when it was last whole; null: it was never seen
    *_not_null(settled_us=BIG),  # by the brokers' clock; compensation/journal.py says what it promises
    *_nullable(suspended_us=BIG),  # by the database's clock; null: it is not suspended
    *_nullable(reason=TEXT),
    *_not_null(changed_us=BIG),
)
trans_compensation_case = _table(
    "trans_compensation_case",
    *_primary_key(name=NAME, message_id=ID),
    *_not_null(state=SMALL, attempts=INTEGER, first_us=BIG, changed_us=BIG),  # compensation/cases.py has the states
    *_not_null(reason=TEXT),
    *_nullable(notes=TEXT),  # a line for each operator action, by versions of escrowmq before the record of acts
)
# A user with INSERT and SELECT alone can add to trans_act, and change nothing of it. A record is a line as in
# acts/chain.py, without its end. The head has one row, with one = 1: number (0: none yet) and hash of the last record.
trans_act = _table("trans_act", *_primary_key(number=BIG), *_not_null(record=TEXT))
trans_act_head = _table("trans_act_head", *_primary_key(one=SMALL), *_not_null(number=BIG, hash=NAME))


def state_is(state: State) -> sa.ColumnElement[bool]:
    """Return the condition that a row of ``trans_message`` has this state, in literals, which a statement needs to use
    a partial index."""
    same = trans_message.c.state == sa.literal_column(str(state.value))
    if state < State.WAITING:
        return same
    return sa.and_(trans_message.c.state >= sa.literal_column(str(State.WAITING.value)), same)


def _index(name: str, *columns: sa.Column[Any], on: tuple[str, ...] = (), only: Any = None) -> None:
    """Create an index, ``on`` these kinds of database only (empty: all); where supported, of the rows for which
    ``only`` holds."""
    partial = {} if only is None else {"postgresql_where": only, "sqlite_where": only}
    index = sa.Index(name, *columns, **partial)
    is_there: Any = lambda ddl, target, bind, dialect, **_: dialect.name in on  # noqa: E731
    if on:
        index.ddl_if(callable_=is_there)


_PARTIAL, _WHOLE = ("postgresql", "sqlite"), ("mysql", "mariadb")
_m, _driven, _case = trans_message.c, trans_driven.c, trans_compensation_case.c
_is_aside = _m.state >= State.WAITING.value
# Rows put aside (RETRYING, HELD, WAITING) and kept rows (SENT, DONE) must not make reads of PENDING rows slower.
_index("trans_message_pending", _m.lane, _m.seq, on=_PARTIAL, only=_m.state == State.PENDING.value)
_index("trans_message_aside", _m.state, _m.lane, _m.due_us, on=_PARTIAL, only=_is_aside)
_index("trans_message_kept", _m.state, _m.sent_us, only=_m.sent_us.is_not(None))
_index("trans_message_by_state", _m.state, _m.lane, _m.seq, on=_WHOLE)
# For lists by state in the order of the table: the statement is answered from the index alone, whatever the database
# believes of the distribution of the states (before ANALYZE, PostgreSQL believes that few rows are in any).
_index("trans_message_listed", _m.state, _m.seq, on=_PARTIAL, only=_is_aside)
_index("trans_recv_log_by_time", trans_recv_log.c.seen_us)  # purged from its left end
_index("trans_barrier_by_time", trans_barrier.c.decided_us)  # likewise
_index("trans_driven_by_group", _driven.producer_group, _driven.state)
_index("trans_driven_by_state", _driven.state, _driven.id, _driven.producer_group)
_index("trans_compensation_case_by_state", _case.name, _case.state, _case.changed_us)
_index("trans_compensation_case_listed", _case.name, _case.state, _case.message_id)
