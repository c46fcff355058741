"""Producer-driven transactions on EscrowMQ: half messages, decided by the producer's own table, de-duplicated by the
broker.

The table of states is in ``driving.py``. No callback is needed: the producer learns each outcome and deletes its row at
once. But the broker checks back on half messages that stay undecided, and every transactional producer must be able to
answer. Here the table itself is the checker, so any living process of the group ends what another one left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.orm import Session

from escrowmq import schemas
from escrowmq.client.bus import Bus
from escrowmq.client.producing.producer import Producer
from escrowmq.model import COMMIT, ROLLBACK, UNKNOWN, Check, Outcome
from escrowmq.outbox.modes.driving import Driving
from escrowmq.outbox.modes.journal import Int64s, Journal, Stage, replace_columns
from escrowmq.outbox.modes.senders import by_shard
from escrowmq.outbox.targets.seam import Codes

_ROLLED_BACK = (Stage.ABANDONED, Stage.ROLLING_BACK)
_ANSWERS = {**dict.fromkeys(Stage, UNKNOWN), **dict.fromkeys(_ROLLED_BACK, ROLLBACK), Stage.COMMITTING: COMMIT}
MERGED_SUFFIX = ".merged"
"""Suffix of the producer group in merged mode. The two modes answer differently about a missing row, so a check must
never reach the other one."""


class Driven(Driving):
    """``Driven(bus, engine, "shop").send(message, business)``: both happen, or neither.

    ``merged=True`` stores the message together with the business change (P1 within P4): one local transaction less, but
    a process that dies between the prepare and P4 leaves a half message that no process can decide. It is parked after
    ``half_retention`` and leaves with the broker's log; it is never visible. ``replaces=True``: only the last prepare
    of an undecided message id counts. It replaces the stored message, and the process that was about to decide that one
    is Fenced (by default, such an id is MESSAGE_ID_TAKEN). ``sessions`` makes sessions for the business (default: plain
    ones on ``engine``); ``timeout`` is seconds for a request. Raises Misuse(NO_TABLES) at the first use if the tables
    are missing.
    """

    def __init__(
        self,
        bus: Bus,
        engine: sa.Engine,
        group: str,
        *,
        merged: bool = False,
        replaces: bool = False,
        sessions: Callable[[], Session] | None = None,
        instance: str | None = None,
        timeout: float = 30.0,
    ) -> None:
        name = group + MERGED_SUFFIX if merged else group
        self.producer = bus.producer(name, instance=instance, timeout=timeout, replaces=replaces)
        self.producer.checker(TableChecker(engine, name, merged=merged))
        carrier = HalfMessages(self.producer)
        super().__init__(carrier, engine, name, merged=merged, replaces=replaces, sessions=sessions)

    def close(self) -> None:
        """Close the producer. Messages in progress stay in the table."""
        self.producer.close()


class HalfMessages:
    """The carrier: each message is a transaction of its own, at the broker that was chosen when it was stored."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer

    def place(self, batch: pa.RecordBatch) -> Int64s:
        return self._producer.place(batch.column("key"))

    def prepare(self, batch: pa.RecordBatch, shards: Int64s) -> tuple[Codes, pa.Array]:
        """Send each row as the half message of a transaction of its own, in one request per shard (``shards``: of each
        row). Returns a code and a transaction id (null without one) per row. A known id gets its transaction again,
        within ``dedup_window``."""
        found = np.full(batch.num_rows, None, object)

        def send(piece: pa.RecordBatch, shard: int) -> Codes:
            blank = replace_columns(piece, transaction=pa.nulls(len(piece), schemas.ID))
            receipts = self._producer.prepare_batch(blank, shard=shard)
            found[shards == shard] = receipts.transactions.to_pylist()
            return receipts.codes

        codes = by_shard(batch, shards, send)
        return codes, pa.array(found.tolist(), schemas.ID)

    def end(self, batch: pa.RecordBatch, shards: Int64s, outcome: Outcome) -> Codes:
        end = self._producer.end_batch
        return by_shard(batch, shards, lambda piece, _: end(piece.column("transaction"), outcome).codes)


class TableChecker:
    """Answers checks from the rows; one query for many.

    | row | answer |
    | --- | --- |
    | STORED | UNKNOWN: a business transaction may be about to decide it |
    | DECIDED | UNKNOWN: it was prepared late, and its row will change soon |
    | ABANDONED, ROLLING_BACK | ROLLBACK |
    | COMMITTING, and it is this transaction | COMMIT |
    | COMMITTING, but another transaction | ROLLBACK: only the last prepare of an id counts |
    | STUCK | UNKNOWN |
    | none | ROLLBACK: rows come before their prepare and go after their end: a later prepare replaced this one |
    | none, merged | UNKNOWN, always: its business transaction may be under way |
    """

    def __init__(self, engine: sa.Engine, group: str, *, merged: bool = False) -> None:
        self._engine = engine
        self._journal = Journal(engine, group)
        self._absent = UNKNOWN if merged else ROLLBACK

    def decide_batch(self, checks: Sequence[Check]) -> list[Outcome]:
        """Return one outcome per check, from the row of its message id: COMMIT if it is COMMITTING with this
        transaction; ROLLBACK if it is given up, rolled back, or of another transaction; else UNKNOWN. Without a row
        ROLLBACK, merged UNKNOWN."""
        ids = [check.messages[0].message_id for check in checks]
        with self._engine.begin() as connection:
            rows = self._journal.stages(connection, ids)
        outcomes = []
        for identity, check in zip(ids, checks, strict=True):
            stage, transaction = rows.get(identity, (None, None))
            outcome = _ANSWERS[stage] if stage is not None else self._absent
            is_other = outcome is COMMIT and transaction != bytes(check.transaction_id)
            outcomes.append(ROLLBACK if is_other else outcome)
        return outcomes
