"""Consumer-side de-duplication: the consumer receives prepares and decisions and matches them in its database. For
any broker that acknowledges.

The broker knows nothing of transactions. The producer sends PREPARE (with the body) and later COMMIT or ROLLBACK as
ordinary messages; the consumer stores the prepare, and deletes it in the transaction of the effect. What that needs:

- COMMIT follows PREPARE: both have the message id as their key, and a key has one queue (partition, stream). A broker
  whose keys move between queues while messages are under way (more partitions, say) breaks it.
- One consumer database for a queue: a COMMIT that comes where the PREPARE was not stored is skipped. All consumers of a
  group share one database; and they take turns, never two at a time on one queue: :meth:`BothReachConsumer.consume`
  asks the broker for that (``ordered=True``); elsewhere it is the assignment's business (one consumer of a partition, a
  single active consumer, ...).
- An end that comes twice has one effect. With ``marks`` (the default) the id is marked in ``trans_recv_log`` for that,
  and a prepare that comes late is dropped, whatever the broker delivers again. Without marks, the paper's own way,
  nothing stays in the database; then the prepare's acknowledgement must be durable before its end has its effect, which
  :meth:`BothReachConsumer.handle` sees to, and the broker must deliver no acknowledged message again.
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
from escrowmq.client.producing.producer import Producer
from escrowmq.errors import Code, Rejected, error
from escrowmq.model import COMMIT, Outcome
from escrowmq.outbox.dialects import database_now_us, insert_or_replace
from escrowmq.outbox.inbox import topic_mark
from escrowmq.outbox.modes.driving import Driving
from escrowmq.outbox.modes.journal import Int64s, ids_of, replaced
from escrowmq.outbox.modes.senders import Sender, sender_of
from escrowmq.outbox.tables import trans_prepared, trans_recv_log
from escrowmq.outbox.targets.seam import Codes, Target
from escrowmq.platform.failpoints import reach
from escrowmq.platform.times import to_us

_log = logging.getLogger(__name__)

SIGN = "trans-sign"
"""The property (header) that tells what a message is: a :class:`Sign`."""
TRANSACTION = "trans-id"
"""The property that names the message id that it is about: 32 hexadecimal digits."""
KEY = "trans-key"
"""The property with the message's own key: the key that travels is the message id."""


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
        self,
        way: Producer | Target | Sender,
        engine: sa.Engine,
        group: str,
        *,
        merged: bool = False,
        sessions: Callable[[], Session] | None = None,
    ) -> None:
        super().__init__(SignedMessages(sender_of(way)), engine, group, merged=merged, sessions=sessions)


class SignedMessages:
    """The carrier: one ordinary message per prepare and one per decision, with one key."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def place(self, batch: pa.RecordBatch) -> Int64s:
        """By the key that will travel."""
        return self._sender.place(_hex_ids(batch))

    def prepare(self, batch: pa.RecordBatch, shards: Int64s) -> tuple[Codes, pa.Array]:
        """Return the message itself, signed PREPARE. One with a delay is BAD_DELAY: its COMMIT would overtake it."""
        if batch.column("delay_us").to_numpy().any():
            return np.full(batch.num_rows, Code.BAD_DELAY, np.uint8), pa.nulls(batch.num_rows, schemas.ID)
        none = pa.nulls(batch.num_rows, schemas.ID)
        columns = (batch.column(name).to_pylist() for name in ("message_id", "key", "properties"))
        properties = [
            [*(own or ()), *_signs(identity, Sign.PREPARE), *(() if key is None else [(KEY, key)])]
            for identity, key, own in zip(*columns, strict=True)
        ]
        signs = pa.array(properties, schemas.PROPERTIES)
        signed = replaced(batch, key=_hex_ids(batch), properties=signs, transaction=none)
        return self._sender.send(signed, shards), none

    def end(self, batch: pa.RecordBatch, shards: Int64s, outcome: Outcome) -> Codes:
        """Return a message without a body, signed COMMIT or ROLLBACK, under an id of its own, the same each time."""
        sign = Sign.COMMIT if outcome is COMMIT else Sign.ROLLBACK
        ids = ids_of(batch)
        ends = replaced(
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
    """Return the message id of a COMMIT or ROLLBACK about ``identity``: a broker that de-duplicates must see that
    it is another message."""
    return hashlib.blake2b(identity + sign.encode(), digest_size=16).digest()


def _hex_ids(batch: pa.RecordBatch) -> pa.Array:
    return pa.array([i.hex() for i in ids_of(batch)], pa.utf8())


def _signs(identity: bytes, sign: Sign) -> list[tuple[str, str]]:
    return [(SIGN, sign.value), (TRANSACTION, identity.hex())]


def has_signs(properties: pa.MapArray) -> bool:
    """Return whether messages of this mode are among those whose properties these are."""
    signs = pc.map_lookup(properties, pa.scalar(SIGN), "first")
    return bool(signs.null_count < len(signs))


# The consumer


@dataclass(frozen=True, slots=True)
class Arrival:
    """One message as it came from a broker."""

    topic: str
    body: bytes
    headers: Mapping[str, str]
    tag: str | None = None

    @property
    def sign(self) -> Sign:
        """Its sign. Rejected(BAD_REQUEST) if it has none."""
        try:
            return Sign(self.headers[SIGN])
        except (KeyError, ValueError):
            raise Rejected(Code.BAD_REQUEST, f"a message of {self.topic!r} has no property {SIGN}") from None

    @property
    def message_id(self) -> bytes:
        """The id that it is about. Rejected(BAD_REQUEST) if it names none."""
        try:
            identity = bytes.fromhex(self.headers[TRANSACTION])
        except (KeyError, ValueError):
            identity = b""
        if len(identity) != 16:
            raise Rejected(Code.BAD_REQUEST, f"a message of {self.topic!r} has no property {TRANSACTION}")
        return identity


@dataclass(frozen=True, slots=True)
class Prepared:
    """One committed message, as the effect gets it: as the producer gave it."""

    message_id: bytes
    topic: str
    body: bytes
    key: str | None
    tag: str | None
    properties: Mapping[str, str]


@dataclass(slots=True)
class Handled:
    """Counts of a consumer's life."""

    effects: int = 0
    rolled_back: int = 0
    skipped: int = 0
    """Ends without a stored prepare: done already, or in the wrong place."""


Effect = Callable[[Session, Sequence[Prepared]], object]
Acknowledge = Callable[[Sequence[int]], None]


class BothReachConsumer:
    """``effect(session, messages)`` happens once for every committed id, in a transaction of this database.

    One thread at a time; one at a time of a group on a queue. ``counts`` tells what it has done.
    """

    def __init__(
        self,
        engine: sa.Engine,
        group: str,
        effect: Effect,
        *,
        marks: bool = True,
        sessions: Callable[[], Session] | None = None,
    ) -> None:
        self._group = group
        self._effect = effect
        self._marks = marks
        self._sessions = sessions or sessionmaker(engine)
        self.counts = Handled()

    def consume(
        self, bus: Bus, topics: str | Sequence[str], *, idle_timeout: float | None = None, lease: float | None = None
    ) -> Handled:
        """Consume EscrowMQ topics until none came for ``idle_timeout`` seconds.

        The group is ordered: the broker gives a queue to one consumer at a time. Raises LEASE_LOST if acknowledgements
        came too late; what was not acknowledged is redelivered.
        """
        with bus.consumer(self._group, topics, ordered=True, lease=lease) as consumer:
            for batch in consumer.batches(idle_timeout=idle_timeout):
                self._handle_received(consumer, batch)
        return self.counts

    def _handle_received(self, consumer: Consumer, batch: ReceivedBatch) -> None:
        messages = list(batch)
        arrivals = [Arrival(m.topic, m.body, m.properties, m.tag) for m in messages]

        def acknowledge(rows: Sequence[int]) -> None:
            if len(rows) == len(messages):
                batch.ack()
                return
            refused = consumer.refused
            for row in rows:
                messages[row].ack()
            if consumer.flush() > refused:
                raise error(Code.LEASE_LOST)

        self.handle(arrivals, acknowledge)

    def forget_prepares(self, older_than: float) -> int:
        """Delete prepares stored ``older_than`` seconds ago whose end never came (a producer in merged mode died); how
        many.

        Longer than any producer may stay away with a decision in its table: its COMMIT would be skipped.
        """
        t = trans_prepared.c
        with self._sessions() as session, session.begin():
            connection = session.connection()
            oldest = database_now_us(connection) - to_us(older_than)
            gone = sa.delete(trans_prepared).where(t.consumer_group == self._group, t.prepared_us < oldest)
            return connection.execute(gone).rowcount

    def handle(self, arrivals: Iterable[Arrival], acknowledge: Acknowledge) -> None:
        """Handle messages in the order in which they came, and have them acknowledged by their numbers.

        ``acknowledge(rows)`` must return only when the broker has taken note of it, and raise if it did not. Raises
        what the effect raised: nothing of its transaction is done then, and nothing of it acknowledged.
        """
        came = list(arrivals)
        signs = [arrival.sign for arrival in came]
        if self._marks:
            self._apply(came, signs)
            reach("both_reach.applied")
            acknowledge(range(len(came)))
        else:
            for rows in _runs(signs):
                self._apply([came[row] for row in rows], [signs[row] for row in rows])
                reach("both_reach.applied")
                acknowledge(rows)
                reach("both_reach.acknowledged")
        reach("both_reach.done")

    def _apply(self, came: list[Arrival], signs: list[Sign]) -> None:
        """One transaction: the prepares stored, the ends with their effect."""
        with self._sessions() as session, session.begin():
            connection = session.connection()
            now = database_now_us(connection)
            names, finished = self._names(connection, came)
            real = {name: arrival.message_id for name, arrival in zip(names, came, strict=True)}
            prepares: dict[bytes, Arrival] = {}  # the last of each message
            ends: dict[bytes, Arrival] = {}  # the first of each message
            for name, arrival, sign in zip(names, came, signs, strict=True):
                if sign is not Sign.PREPARE:
                    ends.setdefault(name, arrival)
                elif name not in ends:  # a prepare after its end is a late copy
                    prepares[name] = arrival
            rows = [self._row(arrival, name, now) for name, arrival in prepares.items() if name not in finished]
            if rows:
                connection.execute(insert_or_replace(connection.dialect.name, trans_prepared), rows)
            found = self._take(connection, {name: real[name] for name in ends if name not in finished})
            effects = [p for name, p in found.items() if ends[name].sign is Sign.COMMIT]
            if self._marks and found:
                marks = [
                    {"consumer_group": self._group, "message_id": n, "seen_us": now, "topic": p.topic}
                    for n, p in found.items()
                ]
                connection.execute(sa.insert(trans_recv_log), marks)
            if effects:
                self._effect(session, effects)
            session.flush()
            reach("both_reach.applying")
        for name in ends.keys() - found.keys():
            text = "%s %s: no stored prepare; done already, or not of this consumer"
            _log.info(text, ends[name].sign, real[name].hex())
        self.counts.effects += len(effects)
        self.counts.rolled_back += len(found) - len(effects)
        self.counts.skipped += len(ends) - len(found)

    def _names(self, connection: sa.Connection, came: list[Arrival]) -> tuple[list[bytes], set[bytes]]:
        """Return each arrival's name in the tables, and which of these names are already decided.

        It is the message id; but where that is another topic's already, a digest of both (see ``outbox/inbox.py``).
        """
        pairs = [(arrival.message_id, arrival.topic) for arrival in came]
        asked = {name for identity, topic in set(pairs) for name in (identity, topic_mark(identity, topic))}
        topics: dict[bytes, str | None] = {}
        finished: set[bytes] = set()
        for table in (trans_recv_log, trans_prepared) if self._marks else (trans_prepared,):
            t = table.c
            known = sa.select(t.message_id, t.topic).where(t.consumer_group == self._group, t.message_id.in_(asked))
            there = {bytes(name): topic for name, topic in connection.execute(known)}
            topics = {**there, **topics}
            finished |= there.keys() if table is trans_recv_log else set()
        names = []
        for identity, topic in pairs:
            other = topic_mark(identity, topic)
            if other not in topics and topics.setdefault(identity, topic) in (None, topic):
                names.append(identity)
            else:
                names.append(other)
        return names, finished

    def _row(self, arrival: Arrival, name: bytes, now: int) -> dict[str, Any]:
        own = {header: value for header, value in arrival.headers.items() if header not in (SIGN, TRANSACTION, KEY)}
        return {
            "consumer_group": self._group,
            "message_id": name,
            "topic": arrival.topic,
            "key": arrival.headers.get(KEY),
            "tag": arrival.tag,
            "properties": json.dumps(own) if own else None,
            "body": arrival.body,
            "prepared_us": now,
        }

    def _take(self, connection: sa.Connection, real: dict[bytes, bytes]) -> dict[bytes, Prepared]:
        """Read and delete stored prepares by their names, in the order of ``real``, which has their message ids."""
        if not real:
            return {}
        t = trans_prepared.c
        mine = (t.consumer_group == self._group, t.message_id.in_(list(real)))
        found = connection.execute(sa.select(trans_prepared).where(*mine)).mappings()
        rows = {bytes(row["message_id"]): row for row in found}
        if rows:
            connection.execute(sa.delete(trans_prepared).where(*mine))
        return {name: _prepared(rows[name], identity) for name, identity in real.items() if name in rows}


def _runs(signs: list[Sign]) -> list[list[int]]:
    """Yield the numbers of prepares, then of ends: ends wait until prepares are acknowledged."""
    prepares = [row for row, sign in enumerate(signs) if sign is Sign.PREPARE]
    ends = [row for row, sign in enumerate(signs) if sign is not Sign.PREPARE]
    return [rows for rows in (prepares, ends) if rows]


def _prepared(row: Any, identity: bytes) -> Prepared:
    properties = json.loads(row["properties"]) if row["properties"] else {}
    return Prepared(identity, row["topic"], row["body"], row["key"], row["tag"], properties)
