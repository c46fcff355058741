"""The producer's own table, ``trans_driven``: which messages are under way, and what has been decided about them.

Every function takes a connection and writes inside its transaction. Messages are columns of schema OUTGOING, whose
``transaction`` is the broker's transaction once it is known; beside them stands the shard of the broker that they
belong to, -1 where the way out has only one place.
"""

from __future__ import annotations

import json
import threading
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
from escrowmq.platform.forks import tell_in_child
from escrowmq.platform.times import to_us

Int64s = npt.NDArray[np.int64]
ONLY_PLACE = -1
"""Instead of a shard, where the way out has only one place. Other negative numbers name a broker: see
``Producer.place``.
"""
PAGE = 1000
"""Rows read, and ids named, in one statement."""
_T = trans_driven.c


class Stage(IntEnum):
    """Where a row stands; ``driving.py`` has the table of what follows each."""

    STORED = 0
    ABANDONED = 1
    COMMITTING = 2
    ROLLING_BACK = 3
    TO_SEND = 4
    STUCK = 5
    DECIDED = 6


class Intake:
    """Messages in any form that a producer takes become one OUTGOING batch with ids. Thread-safe."""

    def __init__(self) -> None:
        self._codec = OutgoingCodec()
        self.on_fork()
        tell_in_child(self)

    def on_fork(self) -> None:
        """Make a new lock, because nobody holds it in this new process."""
        self._lock = threading.Lock()

    def __call__(self, messages: Any) -> pa.RecordBatch:
        """Return the batch. Raises Misuse(BAD_ARGUMENT) for what a row cannot keep (a queue, a transaction to join),
        Rejected as a
        producer does."""
        data = [messages] if isinstance(messages, Message) else messages
        with self._lock:
            batch = as_batch(data, Checker(Limits()), self._codec)
        if batch.num_rows and (batch.column("queue").to_numpy() != -1).any():
            raise Misuse(Code.BAD_ARGUMENT, "such a message cannot name its queue", "give it a key")
        if batch.column("transaction").null_count != batch.num_rows:
            raise Misuse(Code.BAD_ARGUMENT, "such a message is a transaction of its own and joins no other")
        if len(set(ids_of(batch))) < batch.num_rows:
            raise Misuse(Code.BAD_ARGUMENT, "two messages of the batch have the same message id")
        return batch


def ids_of(batch: pa.RecordBatch) -> list[bytes]:
    """Return the message ids."""
    return list(batch.column("message_id").to_pylist())


def some(ids: list[bytes], chosen: npt.NDArray[np.bool_]) -> list[bytes]:
    """Return the chosen ones."""
    return [ids[row] for row in np.flatnonzero(chosen).tolist()]


def replaced(batch: pa.RecordBatch, **columns: pa.Array) -> pa.RecordBatch:
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
        """Store every row. Raises Rejected(MESSAGE_ID_TAKEN) if one of the ids is there already."""
        if not batch.num_rows:
            return
        rows = self._rows(batch, shards, stage, database_now_us(connection))
        try:
            connection.execute(sa.insert(trans_driven), rows)
        except sa.exc.IntegrityError as problem:
            raise _make_taken() from problem

    def replace(self, connection: sa.Connection, batch: pa.RecordBatch, shards: Int64s) -> tuple[Int64s, int]:
        """Store every row as STORED; one that is STORED already gets this content and keeps its shard. The shards of
        all, and their stamp: whoever stored the same ids before has an older one, and can decide nothing any more.

        Raises Rejected(MESSAGE_ID_TAKEN) if one of the ids is decided or given up, or another group's.
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
                of = _T.id == row["id"]
                connection.execute(sa.update(trans_driven).where(of, self._mine).values(row))
        if fresh := [row for row in rows if row["id"] not in found]:
            try:
                connection.execute(sa.insert(trans_driven), fresh)
            except sa.exc.IntegrityError as problem:
                raise _make_taken() from problem
        return kept, stamp

    def retake(self, ids: Sequence[bytes]) -> tuple[pa.RecordBatch, Int64s, int]:
        """In a transaction of its own: those of ``ids`` that are STORED as they are now, with their shards, under a new
        stamp."""
        with self._engine.begin() as connection:
            rows: list[Any] = []
            for piece in _pieces(ids):
                stored = sa.select(trans_driven).where(_T.id.in_(piece), self._mine, _T.state == int(Stage.STORED))
                rows += connection.execute(stored.with_for_update()).mappings()
            stamp = max([database_now_us(connection), *(row["created_us"] + 1 for row in rows)])
            mark = sa.update(trans_driven).where(_T.state == int(Stage.STORED)).values(created_us=stamp)
            self._execute(connection, mark, [row["id"] for row in rows])
        return _batch(rows), _shards(rows), stamp

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
        """Move rows from STORED to COMMITTING, with the broker's transactions; to DECIDED where the broker is
        ``away``. Raises Fenced unless all
        rows were STORED, and under ``stamp`` if that is given."""
        moved = self._move(connection, batch.filter(pa.array(~away)), Stage.COMMITTING, stamp)
        if moved + self._move(connection, batch.filter(pa.array(away)), Stage.DECIDED, stamp) != batch.num_rows:
            raise Fenced(
                Code.FENCED,
                "another process of this group has given these messages up, or replaced them",
                "let redrive() leave messages alone that are younger than your slowest business transaction "
                "(older_than)",
            )

    def prepared(self, batch: pa.RecordBatch) -> None:
        """In a transaction of its own: DECIDED to COMMITTING, with the broker's transactions."""
        with self._engine.begin() as connection:
            self._move(connection, batch, Stage.COMMITTING, None, Stage.DECIDED)

    def _move(
        self, connection: sa.Connection, batch: pa.RecordBatch, to: Stage, stamp: int | None, was: Stage = Stage.STORED
    ) -> int:
        if not batch.num_rows:
            return 0
        only = () if stamp is None else (_T.created_us == stamp,)
        change = (
            sa.update(trans_driven)
            .where(_T.id == sa.bindparam("of"), self._mine, _T.state == int(was), *only)
            .values(state=int(to), transaction_id=sa.bindparam("transaction"))
        )
        transactions = batch.column("transaction").to_pylist()
        rows = [{"of": i, "transaction": t} for i, t in zip(ids_of(batch), transactions, strict=True)]
        return connection.execute(change, rows).rowcount

    def rename(self, batch: pa.RecordBatch) -> None:
        """In a transaction of its own: rows at COMMITTING get other transactions."""
        change = (
            sa.update(trans_driven)
            .where(_T.id == sa.bindparam("of"), self._mine, _T.state == int(Stage.COMMITTING))
            .values(transaction_id=sa.bindparam("transaction"))
        )
        pairs = zip(ids_of(batch), batch.column("transaction").to_pylist(), strict=True)
        with self._engine.begin() as connection:
            connection.execute(change, [{"of": i, "transaction": t} for i, t in pairs])

    def undo(self, connection: sa.Connection, batch: pa.RecordBatch, stamp: int | None = None) -> dict[bytes, Stage]:
        """Move rows from STORED to ROLLING_BACK. Returns the stage of each row: COMMITTING or DECIDED if the commit
        took effect after all.

        Waits for a transaction that is still about to decide one of them: its row lock holds this back.
        """
        self._move(connection, batch, Stage.ROLLING_BACK, stamp)
        return {i: stage for i, (stage, _) in self.stages(connection, ids_of(batch)).items()}

    def abandon(self, ids: Sequence[bytes], gone: Sequence[bytes] = ()) -> None:
        """In a transaction of its own: those of ``ids`` that are STORED are ABANDONED; then ``gone`` are forgotten,
        those that are."""
        given_up = sa.update(trans_driven).where(_T.state == int(Stage.STORED)).values(state=int(Stage.ABANDONED))
        with self._engine.begin() as connection:
            self._execute(connection, given_up, ids)
            abandoned = _T.state == int(Stage.ABANDONED)  # another message may have come under the id
            self._execute(connection, sa.delete(trans_driven).where(abandoned), gone)

    def settle(
        self,
        stages: Sequence[Stage],
        ended: Sequence[bytes],
        left: Sequence[bytes] = (),
        stuck: Mapping[bytes, Code] | None = None,
    ) -> None:
        """In a transaction of its own: forget what has come to its end, count one more try of what is ``left``, leave
        ``stuck``, with what the broker answered, to a person. Only rows at ``stages``: under an id that has come to its
        end there may be another message by now."""
        only = _T.state.in_([int(stage) for stage in stages])
        with self._engine.begin() as connection:
            self._execute(connection, sa.delete(trans_driven).where(only), ended)
            for code in set(stuck.values()) if stuck else ():
                # in this order: MariaDB assigns one after the other
                values = ((_T.was, _T.state), (_T.state, int(Stage.STUCK)), (_T.reason, code.name))
                ids = [identity for identity, answer in stuck.items() if answer is code] if stuck else []
                self._execute(connection, sa.update(trans_driven).where(only).ordered_values(*values), ids)
            self._execute(connection, sa.update(trans_driven).where(only).values(attempts=_T.attempts + 1), left)

    def _execute(self, connection: sa.Connection, statement: sa.Update | sa.Delete, ids: Sequence[bytes]) -> None:
        for piece in _pieces(ids):
            connection.execute(statement.where(_T.id.in_(piece), self._mine))

    def stages(self, connection: sa.Connection, ids: Sequence[bytes]) -> dict[bytes, tuple[Stage, bytes | None]]:
        """Stage and transaction of those of ``ids`` that are there, whatever their group."""
        found: dict[bytes, tuple[Stage, bytes | None]] = {}
        for piece in _pieces(ids):
            rows = connection.execute(sa.select(_T.id, _T.state, _T.transaction_id).where(_T.id.in_(piece)))
            found.update({i: (Stage(state), transaction) for i, state, transaction in rows})
        return found

    def pages(self, stage: Stage, older_than: float = 0.0) -> Iterator[tuple[pa.RecordBatch, Int64s]]:
        """Yield the rows of ``stage`` by id, at least ``older_than`` seconds old, with their shards; each page in a
        transaction of its own.

        Ids say nothing about time: what is stored while one pages may be seen or not, and is found the next time.
        """
        after = b""
        while True:
            page = sa.select(trans_driven).where(self._mine, _T.state == int(stage), _T.id > after)
            with self._engine.begin() as connection:
                if older_than > 0:
                    page = page.where(_T.created_us <= database_now_us(connection) - to_us(older_than))
                page = page.order_by(_T.id).limit(PAGE)
                rows = connection.execute(page).mappings().all()
            if not rows:
                return
            yield _batch(rows), _shards(rows)
            after = rows[-1]["id"]


def _batch(rows: Sequence[Any]) -> pa.RecordBatch:
    fixed = {"queue": -1, "born_us": time.time_ns() // 1000, "immunity_us": 0}
    messages = [
        {
            **row,
            **fixed,
            "message_id": row["id"],
            "transaction": row["transaction_id"],
            "properties": None if (p := row["properties"]) is None else list(json.loads(p).items()),
        }
        for row in rows
    ]
    return pa.RecordBatch.from_pylist(messages, schema=schemas.OUTGOING)


def _shards(rows: Sequence[Any]) -> Int64s:
    return np.array([ONLY_PLACE if row["shard"] is None else row["shard"] for row in rows], np.int64)


def _make_taken() -> Rejected:
    return Rejected(Code.MESSAGE_ID_TAKEN, "a message of this id is under way already")


def _pieces(ids: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    for start in range(0, len(ids), PAGE):
        yield ids[start : start + PAGE]
