"""The producer's own table, ``trans_driven``: the messages in progress, and what is decided about them.

A function that takes a connection writes inside its transaction. Messages are columns of schema OUTGOING, whose
``transaction`` is the broker's transaction once it is known. With them go the shards of their brokers, -1 where a
sender has one destination only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import sqlalchemy as sa

from escrowmq import schemas
from escrowmq.client.producing.outgoing import OutgoingCodec, as_batch
from escrowmq.errors import Code, Fenced, Misuse, Rejected
from escrowmq.message.limits import Limits
from escrowmq.message.row import Checker
from escrowmq.model import Message
from escrowmq.outbox.dialects import database_now_us
from escrowmq.outbox.tables import trans_driven
from escrowmq.platform.times import to_us

Ids = Sequence[bytes]
Int64s = npt.NDArray[np.int64]
ONLY_PLACE = -1
"""The shard where a sender has one destination only. Other negative numbers name a broker (``Producer.place``)."""
PAGE = 1000
"""Rows or ids of one statement."""
_T = trans_driven.c
_CODEC = OutgoingCodec()


class Stage(IntEnum):
    """The state of a row; ``driving.py`` has the table of what follows each."""

    STORED = 0
    ABANDONED = 1
    COMMITTING = 2
    ROLLING_BACK = 3
    TO_SEND = 4
    STUCK = 5
    DECIDED = 6


def to_batch(messages: Any) -> pa.RecordBatch:
    """Convert messages in any form that a producer takes to one OUTGOING batch with ids.

    Raises Misuse(BAD_ARGUMENT) for what a row cannot store (a queue, a transaction to join), Rejected as a producer
    does.
    """
    data = [messages] if isinstance(messages, Message) else messages
    batch = as_batch(data, Checker(Limits()), _CODEC)
    if batch.num_rows and (batch.column("queue").to_numpy() != -1).any():
        raise Misuse(Code.BAD_ARGUMENT, "such a message cannot name its queue", "give it a key")
    if batch.column("transaction").null_count != batch.num_rows:
        raise Misuse(Code.BAD_ARGUMENT, "such a message is a transaction of its own and joins no other")
    if len(set(ids_of(batch))) < batch.num_rows:
        raise Misuse(Code.BAD_ARGUMENT, "two messages of the batch have the same message id")
    return batch


def ids_of(batch: pa.RecordBatch) -> list[bytes]:
    """Return the message ids of a batch, in order."""
    return list(batch.column("message_id").to_pylist())


def pick(ids: list[bytes], chosen: npt.NDArray[np.bool_]) -> list[bytes]:
    """Return the ids at the places where the mask ``chosen`` is True."""
    return [ids[row] for row in np.flatnonzero(chosen).tolist()]


def replace_columns(batch: pa.RecordBatch, **columns: pa.Array) -> pa.RecordBatch:
    """Return the batch with other values in these columns."""
    for name, column in columns.items():
        at = batch.schema.get_field_index(name)
        batch = batch.set_column(at, schemas.OUTGOING.field(at), column)
    return batch


class Journal:
    """The rows of one producer group."""

    def __init__(self, engine: sa.Engine, group: str) -> None:
        self._engine = engine
        self.group = group
        self._mine = _T.producer_group == group

    def insert(self, connection: sa.Connection, batch: pa.RecordBatch, shards: Int64s, stage: Stage) -> None:
        """Store every message of a batch as a row at ``stage``. Raises Rejected(MESSAGE_ID_TAKEN) if one of the ids is
        stored already."""
        if batch.num_rows:
            _insert(connection, self._rows(batch, shards, stage, database_now_us(connection)))

    def replace(self, connection: sa.Connection, batch: pa.RecordBatch, shards: Int64s) -> tuple[Int64s, int]:
        """Store every message of a batch as a STORED row. One that is STORED already gets the new content and keeps its
        shard.

        Returns the shards and one stamp (``created_us``) for all rows. An earlier caller with the same ids has an older
        stamp, and can decide nothing any more. Raises Rejected(MESSAGE_ID_TAKEN) if one of the ids is decided,
        abandoned, or of another group.
        """
        found: dict[bytes, Any] = {}
        for piece in _pieces(ids_of(batch)):
            there = sa.select(_T.id, _T.producer_group, _T.state, _T.shard, _T.created_us).where(_T.id.in_(piece))
            found.update({row.id: row for row in connection.execute(there.with_for_update())})
        if any(row.producer_group != self.group or row.state != int(Stage.STORED) for row in found.values()):
            raise _make_taken()
        stamp = max([database_now_us(connection), *(row.created_us + 1 for row in found.values())])
        old = {identity: ONLY_PLACE if row.shard is None else row.shard for identity, row in found.items()}
        kept = np.array([old.get(i, s) for i, s in zip(ids_of(batch), shards.tolist(), strict=True)], np.int64)
        rows = self._rows(batch, kept, Stage.STORED, stamp)
        for row in rows:
            if row["id"] in found:
                change = sa.update(trans_driven).where(_T.id == row["id"], self._mine)
                connection.execute(change.values(row))
        _insert(connection, [row for row in rows if row["id"] not in found])
        return kept, stamp

    def retake(self, ids: Ids) -> tuple[pa.RecordBatch, Int64s, int]:
        """Give the STORED rows of ``ids`` a new stamp, so that nobody with the old one can decide them, in a
        transaction of its own.

        Returns the rows as they are now, their shards, and the stamp.
        """
        with self._engine.begin() as connection:
            rows: list[Any] = []
            for piece in _pieces(ids):
                stored = sa.select(trans_driven).where(_T.id.in_(piece), self._mine, _T.state == int(Stage.STORED))
                rows += connection.execute(stored.with_for_update()).mappings()
            stamp = max([database_now_us(connection), *(row["created_us"] + 1 for row in rows)])
            mark = sa.update(trans_driven).where(_T.state == int(Stage.STORED)).values(created_us=stamp)
            self._execute(connection, mark, [row["id"] for row in rows])
        return *_from_rows(rows), stamp

    def _rows(self, batch: pa.RecordBatch, shards: Int64s, stage: Stage, now: int) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = batch.drop_columns(["queue", "born_us", "immunity_us"]).to_pylist()
        for row, shard in zip(rows, shards.tolist(), strict=True):
            row["id"], row["transaction_id"] = row.pop("message_id"), row.pop("transaction")
            row["properties"] = None if row["properties"] is None else json.dumps(dict(row["properties"]))
            row["shard"] = None if shard == ONLY_PLACE else shard
            row.update(producer_group=self.group, state=int(stage), attempts=0, created_us=now)
        return rows

    def decide(
        self, connection: sa.Connection, batch: pa.RecordBatch, away: npt.NDArray[np.bool_], stamp: int | None = None
    ) -> None:
        """Move STORED rows to COMMITTING, with the broker's transactions; to DECIDED where the broker is ``away``.

        Raises Fenced unless all rows were STORED, and with this ``stamp`` if it is given.
        """
        moved = 0
        for chosen, stage in ((~away, Stage.COMMITTING), (away, Stage.DECIDED)):
            moved += self._move(connection, batch.filter(pa.array(chosen)), Stage.STORED, stage, stamp)
        if moved != batch.num_rows:
            text = "another process of this group has given these messages up, or replaced them"
            hint = "let redrive() leave messages alone that are younger than your slowest business transaction"
            raise Fenced(Code.FENCED, text, f"{hint} (older_than)")

    def commit(self, batch: pa.RecordBatch, was: Stage) -> None:
        """Move rows from ``was`` to COMMITTING, with the broker's transactions, in a transaction of its own."""
        with self._engine.begin() as connection:
            self._move(connection, batch, was, Stage.COMMITTING)

    def _move(
        self, connection: sa.Connection, batch: pa.RecordBatch, was: Stage, to: Stage, stamp: int | None = None
    ) -> int:
        """Move rows at stage ``was`` (and with ``stamp``, if given) to stage ``to``, and store the batch's transactions
        in them. Returns the number of rows moved."""
        if not batch.num_rows:
            return 0
        change = sa.update(trans_driven).where(_T.id == sa.bindparam("of"), self._mine, _T.state == int(was))
        if stamp is not None:
            change = change.where(_T.created_us == stamp)
        pairs = zip(ids_of(batch), batch.column("transaction").to_pylist(), strict=True)
        change = change.values(state=int(to), transaction_id=sa.bindparam("transaction"))
        return connection.execute(change, [{"of": i, "transaction": t} for i, t in pairs]).rowcount

    def undo(self, connection: sa.Connection, batch: pa.RecordBatch, stamp: int | None = None) -> dict[bytes, Stage]:
        """Move rows (with ``stamp``, if given) from STORED to ROLLING_BACK. Returns the stage of each after that:
        COMMITTING or DECIDED if the commit took effect after all.

        Row locks make this wait for a transaction that is about to decide one of the rows.
        """
        self._move(connection, batch, Stage.STORED, Stage.ROLLING_BACK, stamp)
        return {i: stage for i, (stage, _) in self.stages(connection, ids_of(batch)).items()}

    def abandon(self, ids: Ids, gone: Ids = ()) -> None:
        """Move STORED rows of ``ids`` to ABANDONED, and delete ABANDONED rows of ``gone``, in a transaction of its
        own."""
        change = sa.update(trans_driven).where(_T.state == int(Stage.STORED)).values(state=int(Stage.ABANDONED))
        with self._engine.begin() as connection:
            self._execute(connection, change, ids)
            abandoned = _T.state == int(Stage.ABANDONED)  # another message may have come under the id
            self._execute(connection, sa.delete(trans_driven).where(abandoned), gone)

    def settle(
        self, stages: Sequence[Stage], ended: Ids, left: Ids = (), stuck: Mapping[bytes, Code] | None = None
    ) -> None:
        """Delete the rows ``ended``, count an attempt of those ``left``, and mark those ``stuck`` with the broker's
        answer, in a transaction of its own.

        Only rows at ``stages`` change: the id of an ended message may name another message by now.
        """
        only = _T.state.in_([int(stage) for stage in stages])
        change, stuck = sa.update(trans_driven).where(only), stuck or {}
        with self._engine.begin() as connection:
            self._execute(connection, sa.delete(trans_driven).where(only), ended)
            for code in set(stuck.values()):
                # in this order: MariaDB assigns one after the other
                values = ((_T.was, _T.state), (_T.state, int(Stage.STUCK)), (_T.reason, code.name))
                ids = [identity for identity, answer in stuck.items() if answer is code]
                self._execute(connection, change.ordered_values(*values), ids)
            self._execute(connection, change.values(attempts=_T.attempts + 1), left)

    def _execute(self, connection: sa.Connection, statement: sa.Update | sa.Delete, ids: Ids) -> None:
        for piece in _pieces(ids):
            connection.execute(statement.where(_T.id.in_(piece), self._mine))

    def stages(self, connection: sa.Connection, ids: Ids) -> dict[bytes, tuple[Stage, bytes | None]]:
        """Return the stage and the transaction of each id that is stored, whatever its group."""
        found: dict[bytes, tuple[Stage, bytes | None]] = {}
        for piece in _pieces(ids):
            rows = connection.execute(sa.select(_T.id, _T.state, _T.transaction_id).where(_T.id.in_(piece)))
            found.update({i: (Stage(state), transaction) for i, state, transaction in rows})
        return found

    def pages(self, stage: Stage, older_than: float = 0.0) -> Iterator[tuple[pa.RecordBatch, Int64s]]:
        """Yield the rows of ``stage`` in the order of their ids, at least ``older_than`` seconds old, with their
        shards; each page in a transaction of its own. Rows stored meanwhile may be missed until the next time.
        """
        after = b""
        while True:
            page = sa.select(trans_driven).where(self._mine, _T.state == int(stage), _T.id > after)
            with self._engine.begin() as connection:
                if older_than > 0:
                    page = page.where(_T.created_us <= database_now_us(connection) - to_us(older_than))
                rows = connection.execute(page.order_by(_T.id).limit(PAGE)).mappings().all()
            if not rows:
                return
            yield _from_rows(rows)
            after = rows[-1]["id"]


def _insert(connection: sa.Connection, rows: list[dict[str, Any]]) -> None:
    try:
        if rows:
            connection.execute(sa.insert(trans_driven), rows)
    except sa.exc.IntegrityError as problem:
        raise _make_taken() from problem


def _from_rows(rows: Sequence[Any]) -> tuple[pa.RecordBatch, Int64s]:
    """Convert rows of the table to a batch and the shards of its rows."""
    fixed = {"queue": -1, "born_us": time.time_ns() // 1000, "immunity_us": 0}
    messages = []
    for row in rows:
        names = {"message_id": row["id"], "transaction": row["transaction_id"]}
        properties = None if row["properties"] is None else list(json.loads(row["properties"]).items())
        messages.append({**row, **fixed, **names, "properties": properties})
    shards = [ONLY_PLACE if row["shard"] is None else row["shard"] for row in rows]
    return pa.RecordBatch.from_pylist(messages, schema=schemas.OUTGOING), np.array(shards, np.int64)


def _make_taken() -> Rejected:
    return Rejected(Code.MESSAGE_ID_TAKEN, "a message of this id is under way already")


def _pieces(ids: Ids) -> Iterator[Ids]:
    for start in range(0, len(ids), PAGE):
        yield ids[start : start + PAGE]
