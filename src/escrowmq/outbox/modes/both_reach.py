"""Consumer-side de-duplication: the consumer receives prepares and decisions and matches them in its database. For
any broker that acknowledges.

The broker knows nothing of transactions. The producer sends PREPARE (with the body) and later COMMIT or ROLLBACK as
ordinary messages; the consumer stores the prepare, and deletes it in the transaction of the effect. Requirements:

- COMMIT follows PREPARE: both have the message id as their key, and a key has one queue (partition, stream). A broker
  whose keys move between queues while messages are in flight (more partitions, say) breaks it.
- One consumer database per queue: a COMMIT that arrives where the PREPARE was not stored is skipped. All consumers of a
  group share one database, and take turns on a queue: :meth:`BothReachConsumer.consume` requests that from the broker
  (``ordered=True``); elsewhere the assignment ensures it (one consumer per partition, a single active consumer, ...).
- A repeated decision has one effect. With ``marks`` (the default) the id is therefore marked in ``trans_recv_log``, and
  a late prepare is dropped, whatever the broker redelivers. Without marks (as in the paper) nothing stays in the
  database. Then the prepare's acknowledgement must be durable before its decision has its effect, which
  :meth:`BothReachConsumer.handle` ensures, and the broker must redeliver no acknowledged message.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from escrowmq import schemas
from escrowmq.client.bus import Bus
from escrowmq.client.consuming.consumer import Consumer
from escrowmq.client.consuming.received import ReceivedBatch
from escrowmq.errors import Code, Rejected, error
from escrowmq.model import COMMIT, Outcome
from escrowmq.outbox.dialects import database_now_us, insert_or_replace
from escrowmq.outbox.inbox import topic_mark
from escrowmq.outbox.modes.driving import Driving, Sessions
from escrowmq.outbox.modes.journal import Int64s, ids_of, replace_columns
from escrowmq.outbox.modes.senders import Sender, Way, sender_of
from escrowmq.outbox.tables import trans_prepared, trans_recv_log
from escrowmq.outbox.targets.seam import Codes
from escrowmq.platform.failpoints import reach
from escrowmq.platform.times import to_us

_log = logging.getLogger(__name__)

SIGN = "trans-sign"
"""The property (header) with the kind of a message: a :class:`Sign`."""
TRANSACTION = "trans-id"
"""The property with the message id that it concerns: 32 hexadecimal digits."""
KEY = "trans-key"
"""The property with the message's own key: the broker's key is the message id."""


class Sign(StrEnum):
    """The kind of a message of this mode."""

    PREPARE = "prepare"
    COMMIT = "commit"
    ROLLBACK = "rollback"


# The producer


class BothReachProducer(Driving):
    """``BothReachProducer(target, engine, "shop").send(message, business)``: the steps of ``driving.py`` with ordinary
    messages.

    ``way``: a producer of an EscrowMQ bus (plain messages; each pinned to its broker), or any target of the relay.
    """

    def __init__(
        self, way: Way, engine: sa.Engine, group: str, *, merged: bool = False, sessions: Sessions | None = None
    ) -> None:
        super().__init__(SignedMessages(sender_of(way)), engine, group, merged=merged, sessions=sessions)


class SignedMessages:
    """The carrier: one ordinary message per prepare and one per decision, with one key."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def place(self, batch: pa.RecordBatch) -> Int64s:
        return self._sender.place(_hex_ids(batch))

    def prepare(self, batch: pa.RecordBatch, shards: Int64s) -> tuple[Codes, pa.Array]:
        """Send each message itself, signed PREPARE. Returns a code per row, and nulls: there are no transaction ids. If
        one has a delay, all are BAD_DELAY: its COMMIT would overtake it."""
        none = pa.nulls(batch.num_rows, schemas.ID)
        if batch.column("delay_us").to_numpy().any():
            return np.full(batch.num_rows, Code.BAD_DELAY, np.uint8), none
        columns = (batch.column(name).to_pylist() for name in ("message_id", "key", "properties"))
        properties = [
            [*(own or ()), *_signs(identity, Sign.PREPARE), *(() if key is None else [(KEY, key)])]
            for identity, key, own in zip(*columns, strict=True)
        ]
        signs = pa.array(properties, schemas.PROPERTIES)
        signed = replace_columns(batch, key=_hex_ids(batch), properties=signs, transaction=none)
        return self._sender.send(signed, shards), none

    def end(self, batch: pa.RecordBatch, shards: Int64s, outcome: Outcome) -> Codes:
        """Send for each row a message without a body, signed COMMIT or ROLLBACK, under an id of its own, the same each
        time. Returns COMMITTED or ROLLED_BACK for those stored, and the codes of the others."""
        sign = Sign.COMMIT if outcome is COMMIT else Sign.ROLLBACK
        ids = ids_of(batch)
        ends = replace_columns(
            batch,
            key=_hex_ids(batch),
            tag=pa.nulls(len(ids), pa.utf8()),
            properties=pa.array([_signs(i, sign) for i in ids], schemas.PROPERTIES),
            body=pa.array([b""] * len(ids), pa.binary()),
            message_id=pa.array([end_id(i, sign) for i in ids], schemas.ID),
            delay_us=pa.array(np.zeros(len(ids), np.int64)),
            transaction=pa.nulls(len(ids), schemas.ID),
        )
        codes = self._sender.send(ends, shards)
        codes[codes == 0] = Code.COMMITTED if outcome is COMMIT else Code.ROLLED_BACK
        return codes


def end_id(identity: bytes, sign: Sign) -> bytes:
    """Return the message id (16 bytes) of the COMMIT or ROLLBACK of message ``identity``. It differs from that id, for
    brokers that de-duplicate."""
    return hashlib.blake2b(identity + sign.encode(), digest_size=16).digest()


def _hex_ids(batch: pa.RecordBatch) -> pa.Array:
    return pa.array([i.hex() for i in ids_of(batch)], pa.utf8())


def _signs(identity: bytes, sign: Sign) -> list[tuple[str, str]]:
    return [(SIGN, sign.value), (TRANSACTION, identity.hex())]


def has_signs(properties: pa.MapArray) -> bool:
    """Return whether the properties of any of these messages have the sign of this mode."""
    signs = pc.map_lookup(properties, pa.scalar(SIGN), "first")
    return bool(signs.null_count < len(signs))


# The consumer


@dataclass(frozen=True, slots=True)
class Arrival:
    """One message as received from a broker."""

    topic: str
    body: bytes
    headers: Mapping[str, str]
    tag: str | None = None

    @property
    def sign(self) -> Sign:
        """Return whether it is a prepare, a commit or a rollback, by its header. Raises Rejected(BAD_REQUEST) without
        one."""
        try:
            return Sign(self.headers[SIGN])
        except (KeyError, ValueError):
            raise self._lacks(SIGN) from None

    @property
    def message_id(self) -> bytes:
        """The id (16 bytes) of the message that it prepares or decides, by its header. Raises Rejected(BAD_REQUEST)
        without one."""
        try:
            identity = bytes.fromhex(self.headers[TRANSACTION])
        except (KeyError, ValueError):
            identity = b""
        if len(identity) != 16:
            raise self._lacks(TRANSACTION)
        return identity

    def _lacks(self, name: str) -> Rejected:
        return Rejected(Code.BAD_REQUEST, f"a message of {self.topic!r} has no property {name}")


@dataclass(frozen=True, slots=True)
class Prepared:
    """One committed message, as the producer sent it."""

    message_id: bytes
    topic: str
    body: bytes
    key: str | None
    tag: str | None
    properties: Mapping[str, str]


@dataclass(slots=True)
class Handled:
    """Counts since a consumer was made."""

    effects: int = 0
    rolled_back: int = 0
    skipped: int = 0
    """Decisions without a stored prepare: handled already, or of another database."""


Effect = Callable[[Session, Sequence[Prepared]], object]
Acknowledge = Callable[[Sequence[int]], None]


class BothReachConsumer:
    """``effect(session, messages)`` happens once for every committed id, in a transaction of this database.

    One thread at a time; one consumer of a group at a time on a queue. ``counts``: what it has done so far.
    """

    def __init__(
        self, engine: sa.Engine, group: str, effect: Effect, *, marks: bool = True, sessions: Sessions | None = None
    ) -> None:
        self._group, self._effect, self._marks = group, effect, marks
        self._sessions = sessions or sessionmaker(engine)
        self.counts = Handled()

    def consume(
        self, bus: Bus, topics: str | Sequence[str], *, idle_timeout: float | None = None, lease: float | None = None
    ) -> Handled:
        """Consume EscrowMQ topics until no message arrives for ``idle_timeout`` seconds. Returns the counts since this
        object was made.

        The group is ordered: the broker gives a queue to one consumer at a time. Raises LEASE_LOST if acknowledgements
        were too late; unacknowledged messages are redelivered.
        """
        with bus.consumer(self._group, topics, ordered=True, lease=lease) as consumer:
            for batch in consumer.batches(idle_timeout=idle_timeout):
                self._handle_received(consumer, batch)
        return self.counts

    def _handle_received(self, consumer: Consumer, batch: ReceivedBatch) -> None:
        messages = list(batch)

        def acknowledge(rows: Sequence[int]) -> None:
            if len(rows) == len(messages):
                batch.ack()
                return
            refused = consumer.refused
            for row in rows:
                messages[row].ack()
            if consumer.flush() > refused:
                raise error(Code.LEASE_LOST)

        self.handle([Arrival(m.topic, m.body, m.properties, m.tag) for m in messages], acknowledge)

    def forget_prepares(self, older_than: float) -> int:
        """Delete prepares stored ``older_than`` seconds ago without a decision (a producer in merged mode died).

        Must exceed the longest outage of a producer with a decision in its table: its COMMIT would be skipped. Returns
        how many were deleted.
        """
        t = trans_prepared.c
        with self._sessions() as session, session.begin():
            connection = session.connection()
            oldest = database_now_us(connection) - to_us(older_than)
            gone = sa.delete(trans_prepared).where(t.consumer_group == self._group, t.prepared_us < oldest)
            return connection.execute(gone).rowcount

    def handle(self, arrivals: Iterable[Arrival], acknowledge: Acknowledge) -> None:
        """Store the prepares and apply the decisions among these messages, in the order of their arrival, and
        acknowledge them.

        ``acknowledge(rows)`` gets their numbers in ``arrivals``; it must return only when the broker has stored it, and
        raise otherwise. Raises what the effect raised: its transaction is rolled back then, and nothing of it
        acknowledged.
        """
        arrivals = list(arrivals)
        signs = [arrival.sign for arrival in arrivals]
        for rows in [list(range(len(signs)))] if self._marks else _split_by_sign(signs):
            self._apply([arrivals[row] for row in rows], [signs[row] for row in rows])
            reach("both_reach.applied")
            acknowledge(rows)
            reach("both_reach.acknowledged")
        reach("both_reach.done")

    def _apply(self, arrivals: list[Arrival], signs: list[Sign]) -> None:
        """Store the prepares and apply the effects of the decisions, in one transaction; then add to ``counts``."""
        with self._sessions() as session, session.begin():
            connection = session.connection()
            now = database_now_us(connection)
            names, finished = self._names(connection, arrivals)
            ids = {name: arrival.message_id for name, arrival in zip(names, arrivals, strict=True)}
            prepares: dict[bytes, Arrival] = {}  # the last of each message
            ends: dict[bytes, Arrival] = {}  # the first of each message
            for name, arrival, sign in zip(names, arrivals, signs, strict=True):
                if sign is not Sign.PREPARE:
                    ends.setdefault(name, arrival)
                elif name not in ends:  # a prepare after its end is a late copy
                    prepares[name] = arrival
            rows = [self._row(arrival, name, now) for name, arrival in prepares.items() if name not in finished]
            if rows:
                connection.execute(insert_or_replace(connection.dialect.name, trans_prepared), rows)
            found = self._take(connection, {name: ids[name] for name in ends if name not in finished})
            effects = [p for name, p in found.items() if ends[name].sign is Sign.COMMIT]
            if self._marks and found:
                mark = {"consumer_group": self._group, "seen_us": now}
                marks = [{**mark, "message_id": name, "topic": p.topic} for name, p in found.items()]
                connection.execute(sa.insert(trans_recv_log), marks)
            if effects:
                self._effect(session, effects)
            session.flush()
            reach("both_reach.applying")
        for name in ends.keys() - found.keys():
            text = "%s %s: no stored prepare; done already, or not of this consumer"
            _log.info(text, ends[name].sign, ids[name].hex())
        self.counts.effects += len(effects)
        self.counts.rolled_back += len(found) - len(effects)
        self.counts.skipped += len(ends) - len(found)

    def _names(self, connection: sa.Connection, arrivals: list[Arrival]) -> tuple[list[bytes], set[bytes]]:
        """Return each arrival's name in the tables, and which of these names are decided already.

        The name is the message id; or a digest of id and topic, where the id names another topic's message (see
        ``outbox/inbox.py``).
        """
        pairs = [(arrival.message_id, arrival.topic) for arrival in arrivals]
        wanted = {name for identity, topic in set(pairs) for name in (identity, topic_mark(identity, topic))}
        topics: dict[bytes, str | None] = {}
        finished: set[bytes] = set()
        for table in (trans_recv_log, trans_prepared) if self._marks else (trans_prepared,):
            t = table.c
            known = sa.select(t.message_id, t.topic).where(t.consumer_group == self._group, t.message_id.in_(wanted))
            there = {bytes(name): topic for name, topic in connection.execute(known)}
            topics = {**there, **topics}
            finished |= there.keys() if table is trans_recv_log else set()
        names = []
        for identity, topic in pairs:
            other = topic_mark(identity, topic)
            is_first = other not in topics and topics.setdefault(identity, topic) in (None, topic)
            names.append(identity if is_first else other)
        return names, finished

    def _row(self, arrival: Arrival, name: bytes, now: int) -> dict[str, Any]:
        own = {header: value for header, value in arrival.headers.items() if header not in (SIGN, TRANSACTION, KEY)}
        content = {"topic": arrival.topic, "tag": arrival.tag, "key": arrival.headers.get(KEY), "body": arrival.body}
        row = {"consumer_group": self._group, "message_id": name, "prepared_us": now, **content}
        return {**row, "properties": json.dumps(own) if own else None}

    def _take(self, connection: sa.Connection, ids: dict[bytes, bytes]) -> dict[bytes, Prepared]:
        """Read and delete the stored prepares of these names, whose message ids are the values; in the same order."""
        if not ids:
            return {}
        mine = (trans_prepared.c.consumer_group == self._group, trans_prepared.c.message_id.in_(list(ids)))
        rows = {bytes(row.message_id): row for row in connection.execute(sa.select(trans_prepared).where(*mine))}
        if rows:
            connection.execute(sa.delete(trans_prepared).where(*mine))
        found: dict[bytes, Prepared] = {}
        for name, identity in ids.items():
            if (row := rows.get(name)) is not None:
                properties = json.loads(row.properties) if row.properties else {}
                found[name] = Prepared(identity, row.topic, row.body, row.key, row.tag, properties)
        return found


def _split_by_sign(signs: list[Sign]) -> list[list[int]]:
    """Return the row numbers of prepares, then of decisions, which must wait until prepares are acknowledged."""
    prepares = [row for row, sign in enumerate(signs) if sign is Sign.PREPARE]
    ends = [row for row, sign in enumerate(signs) if sign is not Sign.PREPARE]
    return [rows for rows in (prepares, ends) if rows]
