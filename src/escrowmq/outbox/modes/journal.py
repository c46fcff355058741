"""The producer's own table, ``trans_driven``: which messages are under way, and what has been decided about them.

Every function takes a connection and writes inside its transaction. Messages are columns of schema OUTGOING, whose
``transaction`` is the broker's transaction once it is known; beside them stands the shard of the broker that they belong
to, -1 where the way out has only one place.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
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
from escrowmq.outbox.tables import trans_driven

Int64s = npt.NDArray[np.int64]
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


class Intake:
    """Messages in any form that a producer takes become one OUTGOING batch with ids. Thread-safe."""

    def __init__(self) -> None:
        self._codec = OutgoingCodec()
        self._lock = threading.Lock()

    def __call__(self, messages: Any) -> pa.RecordBatch:
        """The batch. Raises Misuse(BAD_ARGUMENT) for what a row cannot keep (a queue, a transaction to join), Rejected as a
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
    """The message ids."""
    return list(batch.column("message_id").to_pylist())


def with_transactions(batch: pa.RecordBatch, transactions: pa.Array) -> pa.RecordBatch:
    """The batch, its transactions known."""
    at = batch.schema.get_field_index("transaction")
    return batch.set_column(at, schemas.OUTGOING.field(at), transactions)


class Journal:
    """The rows of one producer group."""

    def __init__(self, group: str) -> None:
        self.group = group

    def insert(self, connection: sa.Connection, batch: pa.RecordBatch, shards: Int64s, stage: Stage) -> None:
        """Store every row. Raises Rejected(MESSAGE_ID_TAKEN) if one of the ids is there already."""
        now = time.time_ns() // 1000
        columns = [batch.column(name).to_pylist() for name in _CONTENT]
        rows = [
            {
                **dict(zip(_CONTENT, values, strict=True)),
                "properties": _pack(values[_PROPERTIES]),
                "shard": None if shard < 0 else shard,
            }
            for shard, *values in zip(shards.tolist(), *columns, strict=True)
        ]
        for row in rows:
            row["id"], row["transaction_id"] = row.pop("message_id"), row.pop("transaction")
            row.update(producer_group=self.group, state=int(stage), attempts=0, created_us=now)
        try:
            connection.execute(sa.insert(trans_driven), rows)
        except sa.exc.IntegrityError as problem:
            raise Rejected(Code.MESSAGE_ID_TAKEN, "a message of this id is under way already") from problem

    def decide(self, connection: sa.Connection, batch: pa.RecordBatch, stage: Stage) -> None:
        """STORED to ``stage``, with the broker's transactions. Raises Fenced unless all rows were STORED."""
        if self._move(connection, batch, Stage.STORED, stage) != batch.num_rows:
            raise Fenced(
                Code.FENCED,
                "another process of this group has given these messages up",
                "let redrive() leave messages alone that are younger than your slowest business transaction (older_than)",
            )

    def _move(self, connection: sa.Connection, batch: pa.RecordBatch, stage: Stage, to: Stage) -> int:
        change = (
            sa.update(trans_driven)
            .where(_T.id == sa.bindparam("of"), _T.producer_group == self.group, _T.state == int(stage))
            .values(state=int(to), transaction_id=sa.bindparam("transaction"))
        )
        transactions = batch.column("transaction").to_pylist()
        rows = [{"of": i, "transaction": t} for i, t in zip(ids_of(batch), transactions, strict=True)]
        return connection.execute(change, rows).rowcount

    def undo(self, connection: sa.Connection, batch: pa.RecordBatch) -> dict[bytes, Stage]:
        """STORED to ROLLING_BACK, and where each row stands then: at COMMITTING if the commit did arrive after all.

        Waits for a transaction that is still about to decide one of them: its row lock holds this back.
        """
        self._move(connection, batch, Stage.STORED, Stage.ROLLING_BACK)
        return {i: stage for i, (stage, _) in self.stages(connection, ids_of(batch)).items()}

    def move(self, connection: sa.Connection, ids: Sequence[bytes], stage: Stage, to: Stage) -> None:
        """Those of ``ids`` that stand at ``stage`` go to ``to``."""
        for some in _pieces(ids):
            where = (_T.id.in_(some), _T.producer_group == self.group, _T.state == int(stage))
            connection.execute(sa.update(trans_driven).where(*where).values(state=int(to)))

    def stick(self, connection: sa.Connection, ids: Sequence[bytes]) -> None:
        """Leave ``ids`` to a person."""
        for some in _pieces(ids):
            where = (_T.id.in_(some), _T.producer_group == self.group)
            connection.execute(sa.update(trans_driven).where(*where).values(state=int(Stage.STUCK)))

    def count_attempt(self, connection: sa.Connection, ids: Sequence[bytes]) -> None:
        """One more try that brought no end."""
        for some in _pieces(ids):
            change = sa.update(trans_driven).where(_T.id.in_(some)).values(attempts=_T.attempts + 1)
            connection.execute(change)

    def delete(self, connection: sa.Connection, ids: Sequence[bytes]) -> None:
        """Forget what has come to its end."""
        for some in _pieces(ids):
            connection.execute(sa.delete(trans_driven).where(_T.id.in_(some), _T.producer_group == self.group))

    def stages(self, connection: sa.Connection, ids: Sequence[bytes]) -> dict[bytes, tuple[Stage, bytes | None]]:
        """Stage and transaction of those of ``ids`` that are there, whatever their group."""
        found: dict[bytes, tuple[Stage, bytes | None]] = {}
        for some in _pieces(ids):
            rows = connection.execute(sa.select(_T.id, _T.state, _T.transaction_id).where(_T.id.in_(some)))
            found.update({i: (Stage(state), transaction) for i, state, transaction in rows})
        return found

    def page(
        self, connection: sa.Connection, stage: Stage, after: bytes, older_than: float
    ) -> tuple[pa.RecordBatch, Int64s]:
        """The next rows of ``stage`` by id, at least ``older_than`` seconds old, with their shards.

        Ids say nothing about time: what is stored while one pages may be seen or not, and is found the next time.
        """
        oldest = time.time_ns() // 1000 - round(older_than * 1e6)
        where = (_T.producer_group == self.group, _T.state == int(stage), _T.id > after, _T.created_us <= oldest)
        rows = connection.execute(sa.select(trans_driven).where(*where).order_by(_T.id).limit(PAGE)).mappings().all()
        shards = np.array([-1 if row["shard"] is None else row["shard"] for row in rows], np.int64)
        return _batch(rows), shards


_CONTENT = ("message_id", "transaction", "topic", "key", "tag", "properties", "body", "delay_us")
_PROPERTIES = _CONTENT.index("properties")


def _pack(pairs: Any) -> str | None:
    return None if pairs is None else json.dumps(dict(pairs))


def _batch(rows: Sequence[Any]) -> pa.RecordBatch:
    now = time.time_ns() // 1000
    columns: dict[str, Any] = {
        name: [row[name] for row in rows] for name in ("topic", "key", "tag", "body", "delay_us")
    }
    columns["message_id"] = [row["id"] for row in rows]
    columns["transaction"] = [row["transaction_id"] for row in rows]
    columns["properties"] = [None if (p := row["properties"]) is None else list(json.loads(p).items()) for row in rows]
    columns.update(queue=[-1] * len(rows), born_us=[now] * len(rows), immunity_us=[0] * len(rows))
    return pa.RecordBatch.from_pydict({f.name: columns[f.name] for f in schemas.OUTGOING}, schema=schemas.OUTGOING)


def _pieces(ids: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    for start in range(0, len(ids), PAGE):
        yield ids[start : start + PAGE]
