"""The steps of a producer-driven transaction, and the next step for each row state after a restart.

Theory of operation. The producer's table is the only memory; a process that has it can finish what another began. Every
state has exactly one next step, and every step may be repeated:

| state | reached by | next step, also after a restart |
| --- | --- | --- |
| STORED | P1: stored, perhaps prepared | the business decides (P4); after a restart: give up, ABANDONED |
| ABANDONED | given up before P4 | prepare once more under the same id to learn the transaction, roll it back, delete |
| COMMITTING | P4: together with the business change | commit (P5, P6), delete (P7) |
| ROLLING_BACK | P4 failed | roll back (P5, P6), delete (P7) |
| DECIDED | P4 while the broker was away, and nothing was sent to it | prepare under the same id; then COMMITTING |
| STUCK | the broker holds the opposite decision, or is none of those given | a person decides (``stuck.py``); nothing is done |

P4 moves STORED to COMMITTING inside the business transaction and demands that it does: a row that another process has
abandoned meanwhile fails the business transaction (Fenced). Whether a business transaction that failed has committed
after all (a connection lost in COMMIT) is asked of the row, which waits for it: never guessed. Merged mode has no
STORED: a row comes with the business change, and a prepare whose process died before that leaves with the broker's log.

A message whose broker is away is decided all the same: the business change needs no broker's answer first, as long as
the prepare surely did not leave (BROKER_AWAY). Where that is not known, the business does not happen, because the half
message might be there without its row.

P7 follows P6 alone: a row goes only when the broker has said that it is done.
"""  # noqa: E501  # rows of a table

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, sessionmaker

from escrowmq.errors import STANDS_COMMITTED, STANDS_ROLLED_BACK, Code, EscrowError, Fenced, Rejected, error
from escrowmq.model import COMMIT, ROLLBACK, Message, Outcome, TransactionId
from escrowmq.outbox.modes.journal import Int64s, Intake, Journal, Stage, ids_of, replaced, some
from escrowmq.outbox.session import transaction_of
from escrowmq.outbox.tables import trans_driven
from escrowmq.outbox.targets.seam import NOT_APPLIED, REFUSED, Codes
from escrowmq.platform.failpoints import reach

_log = logging.getLogger(__name__)

Business = Callable[[Session], object]
Flags = npt.NDArray[np.bool_]
Redo = Callable[[Session, Sequence[Message]], object]

_ENDED: dict[Outcome, list[int]] = {
    COMMIT: [*STANDS_COMMITTED],
    # a transaction that the broker does not know, or that expired, is as good as rolled back: it will never be seen
    ROLLBACK: [*STANDS_ROLLED_BACK, Code.EXPIRED, Code.UNKNOWN_TRANSACTION],
}


_STAGES = {COMMIT: [Stage.COMMITTING], ROLLBACK: [Stage.ROLLING_BACK, Stage.ABANDONED]}
"""Where the rows stand that come to an end with each outcome."""


class Carrier(Protocol):
    """How prepares and decisions travel. Codes as in :mod:`escrowmq.outbox.modes.senders`; raises only Misuse."""

    def place(self, batch: pa.RecordBatch) -> Int64s:
        """Return the shard that each row belongs to from now on."""
        ...

    def prepare(self, batch: pa.RecordBatch, shards: Int64s) -> tuple[Codes, pa.Array]:
        """P2 and P3: one code and one transaction (null: it has no id of its own) per row. The same again for the same
        id."""
        ...

    def end(self, batch: pa.RecordBatch, shards: Int64s, outcome: Outcome) -> Codes:
        """P5 and P6: what the broker says of each decision, as :meth:`Producer.end_batch` does."""
        ...


@dataclass(frozen=True, slots=True)
class DrivenResult:
    """The result for one message whose business change is committed.

    ``code`` is COMMITTED or ALREADY_COMMITTED when the message is out; anything else is why it is not yet: its row
    stands at COMMITTING, and :meth:`Driving.redrive` will finish it (or at STUCK, for a person: CONFLICT, EXPIRED,
    ...).
    """

    message_id: bytes
    transaction_id: TransactionId | None
    code: Code

    @property
    def done(self) -> bool:
        """Whether the message is out and its row deleted."""
        return self.code in STANDS_COMMITTED


class DrivenResults:
    """The results of a batch: ``message_ids`` and ``transactions`` (Arrow), ``codes`` (uint8); indexing gives a
    DrivenResult."""

    __slots__ = ("codes", "message_ids", "transactions")

    def __init__(self, batch: pa.RecordBatch, codes: Codes) -> None:
        self.message_ids: pa.Array = batch.column("message_id")
        self.transactions: pa.Array = batch.column("transaction")
        self.codes = codes

    @property
    def done(self) -> bool:
        """Whether all of it is out."""
        return bool(np.isin(self.codes, _ENDED[COMMIT]).all())

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, row: int) -> DrivenResult:
        raw = self.transactions[row].as_py()
        transaction = None if raw is None else TransactionId.from_bytes(raw)
        return DrivenResult(self.message_ids[row].as_py(), transaction, Code(int(self.codes[row])))

    def __iter__(self) -> Iterator[DrivenResult]:
        return (self[row] for row in range(len(self)))


@dataclass(slots=True)
class Redriven:
    """The result of :meth:`Driving.redrive`: counts of messages."""

    committed: int = 0
    rolled_back: int = 0
    left: int = 0
    """The broker did not answer, or takes nothing now: the next redrive tries again."""
    stuck: int = 0
    """The broker holds the opposite decision, or is none of those given: a person must look."""


class Driving:
    """The steps, over one carrier and one table. Thread-safe where the engine and the carrier are."""

    def __init__(
        self,
        carrier: Carrier,
        engine: sa.Engine,
        group: str,
        *,
        merged: bool = False,
        replaces: bool = False,
        sessions: Callable[[], Session] | None = None,
    ) -> None:
        self._carrier = carrier
        self._engine = engine
        self._sessions = sessions or sessionmaker(engine)
        self._journal = Journal(engine, group)
        self._intake = Intake()
        self._merged = merged
        self._replaces = replaces

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the broker, unless the caller made the way to it. What is under way stays in the table."""

    # The way forward

    def send(self, message: Message, business: Business) -> DrivenResult:
        """One message and one local transaction: both, or neither. As :meth:`run_batch`."""
        return self.run_batch([message], business)[0]

    def run_batch(self, messages: Any, business: Business) -> DrivenResults:
        """Many messages and one local transaction ``business(session)``: all, or none of them.

        ``messages``: anything that a producer's batch may be. One SQL statement per step, one request per step and
        broker. An exception of ``business`` takes everything back and continues. When this returns, the business change
        is committed.

        Raises what the broker or the database raised before P4 (then nothing happened: the row, if there is one still,
        will be rolled back), Fenced if another process gave the messages up meanwhile.
        """
        results: list[DrivenResults] = []
        with self.transaction(messages, results) as session:
            business(session)
        return results[0]

    @contextmanager
    def transaction(
        self,
        messages: Any,
        results: list[DrivenResults] | None = None,
        *,
        sessions: Callable[[], Session] | None = None,
    ) -> Iterator[Session]:
        """Context manager: prepare, then yield the session of the business transaction; leaving commits both.

        Do not commit the session yourself. ``messages`` may be one Message; ``results`` gets a DrivenResults;
        ``sessions``: another factory for this one, on the same database.
        """
        batch = self._intake(messages)
        shards = self._carrier.place(batch)
        stamp = None
        if not self._merged:
            with self._engine.begin() as connection:
                if self._replaces:
                    shards, stamp = self._journal.replace(connection, batch, shards)
                else:
                    self._journal.insert(connection, batch, shards, Stage.STORED)
            reach("driven.stored")
        prepared, codes = self._prepared(batch, shards)
        away = codes != 0
        with self._deciding(prepared, shards, sessions or self._sessions, stamp, away) as session:
            yield session
        reach("driven.decided")
        if not away.all() or not len(away):
            codes[~away] = self._finish(prepared.filter(pa.array(~away)), shards[~away], COMMIT)
        if results is not None:
            results.append(DrivenResults(prepared, codes))

    def _prepared(self, batch: pa.RecordBatch, shards: Int64s) -> tuple[pa.RecordBatch, Codes]:
        """P2 and P3: the batch with its transactions, and codes: OK, or BROKER_AWAY of rows that were not sent. What
        was not taken otherwise takes everything back, and is raised."""
        codes, transactions = self._carrier.prepare(batch, shards)
        prepared = replaced(batch, transaction=transactions)
        reach("driven.prepared")
        wrong = (codes != 0) & (codes != Code.BROKER_AWAY)
        if wrong.any():
            problem = error(Code(int(codes[np.flatnonzero(wrong)[0]])))
            try:
                self._take_back(prepared, shards, codes)
            except (EscrowError, SQLAlchemyError) as another:
                _note(problem, another)
            raise problem
        return prepared, codes

    def _take_back(self, batch: pa.RecordBatch, shards: Int64s, codes: Codes) -> None:
        """Undo a partly failed prepare: rows surely not taken go, those taken are rolled back, the rest stays."""
        taken, gone = codes == 0, NOT_APPLIED[codes]
        if not self._merged:
            self._journal.abandon(ids_of(batch), gone=some(ids_of(batch), gone))
        if taken.any():
            rows = np.flatnonzero(taken)
            self._finish(batch.take(pa.array(rows)), shards[rows], ROLLBACK)

    @contextmanager
    def _deciding(
        self,
        batch: pa.RecordBatch,
        shards: Int64s,
        sessions: Callable[[], Session],
        stamp: int | None,
        away: Flags,
    ) -> Iterator[Session]:
        """P4: the business transaction and the new state, together."""
        ours = False
        try:
            with sessions() as session, session.begin():
                # First of all, so that nothing of the business is done in vain, and the rows are locked until its end.
                with transaction_of(session, trans_driven) as connection:
                    if self._merged:
                        for chosen, stage in ((~away, Stage.COMMITTING), (away, Stage.DECIDED)):
                            self._journal.insert(connection, batch.filter(pa.array(chosen)), shards[chosen], stage)
                    else:
                        self._journal.decide(connection, batch, away, stamp)
                ours = True
                yield session
                session.flush()
                reach("driven.deciding")
        except Exception as problem:
            if not ours and isinstance(problem, Fenced | Rejected):
                raise  # the rows are in other hands: there is nothing to take back
            try:
                committed = self._undone(batch, shards, stamp)
            except (EscrowError, SQLAlchemyError) as another:
                _note(problem, another)
                raise problem from None
            if not committed:
                raise
            _log.warning("a business transaction had committed although its end raised %r", problem)

    def _undone(self, batch: pa.RecordBatch, shards: Int64s, stamp: int | None) -> bool:
        """Find out from the rows whether a failed P4 committed after all; if not, take the messages back."""
        ids = ids_of(batch)
        if self._merged:
            # Rows where the business transaction's would be: they wait for one that is still committing, and one that
            # comes late fails on them.
            try:
                with self._engine.begin() as connection:
                    self._journal.insert(connection, batch, shards, Stage.ROLLING_BACK)
            except Rejected:
                return True
        else:
            with self._engine.begin() as connection:
                stages = self._journal.undo(connection, batch, stamp)
            if ids and all(stages.get(i) in (Stage.COMMITTING, Stage.DECIDED) for i in ids):
                return True
            if not all(stages.get(i) is Stage.ROLLING_BACK for i in ids):
                return False  # another process has given them up, and ends them
        self._finish(batch, shards, ROLLBACK)
        return False

    # The end

    def _finish(self, batch: pa.RecordBatch, shards: Int64s, outcome: Outcome) -> Codes:
        """P5, P6, P7 of rows that are decided. What may still be taken stays; what is surely refused is STUCK."""
        codes = self._carrier.end(batch, shards, outcome)
        if outcome is COMMIT and self._replaces:
            codes = self._end_anew(batch, shards, codes)
        reach("driven.ended")
        ids = ids_of(batch)
        ended, contrary = sorted_out(codes, outcome)
        for row in np.flatnonzero(contrary).tolist():
            _log.error("%s: the broker answers %s to %s", ids[row].hex(), Code(codes[row]).name, outcome.name)
        try:
            left = some(ids, ~ended & ~contrary)
            self._journal.settle(_STAGES[outcome], some(ids, ended), left, _answers(ids, codes, contrary))
        except SQLAlchemyError as problem:
            _log.warning("rows that have come to their end are left for the next redrive: %s", problem)
        reach("driven.deleted")
        return codes

    def _end_anew(self, batch: pa.RecordBatch, shards: Int64s, codes: Codes) -> Codes:
        """Prepare and commit again the COMMITTING rows whose transaction was replaced by a late prepare of a
        process that can decide nothing any more: the row counts."""
        rows = np.flatnonzero(codes == Code.CONFLICT)
        if not len(rows):
            return codes
        piece = batch.take(pa.array(rows))
        answers, transactions = self._carrier.prepare(piece, shards[rows])
        moved = (answers == 0) & np.array(
            [a != b for a, b in zip(transactions.to_pylist(), piece.column("transaction").to_pylist(), strict=True)]
        )
        if moved.any():
            mask = pa.array(moved)
            anew = replaced(piece, transaction=transactions).filter(mask)
            self._journal.rename(anew)
            codes = codes.copy()
            codes[rows[moved]] = self._carrier.end(anew, shards[rows[moved]], COMMIT)
        return codes

    # After a restart

    def redrive(self, redo: Redo | None = None, *, older_than: float = 0.0) -> Redriven:
        """Finish all rows of this group in the table.

        Call it at the start and regularly. Stored messages without a decision are abandoned, unless
        ``redo(session, messages)`` repeats their business change: then they are prepared again under the same id and
        decided with it. While other processes of the group are running, ``older_than`` (seconds, by the database's
        clock) must exceed their slowest business transaction, otherwise theirs is fenced.
        """
        report = Redriven()
        for batch, shards in self._journal.pages(Stage.STORED, older_than):
            if redo is None:
                self._journal.abandon(ids_of(batch))
            else:
                self._redo(batch, shards, redo, report)
        for batch, shards in self._journal.pages(Stage.ABANDONED):
            self._roll_back_unknown(batch, shards, report)
        for batch, shards in self._journal.pages(Stage.DECIDED, older_than):
            self._prepare_decided(batch, shards, report)
        for batch, shards in self._journal.pages(Stage.COMMITTING, older_than):
            _count(report, self._finish(batch, shards, COMMIT), COMMIT)
        for batch, shards in self._journal.pages(Stage.ROLLING_BACK):
            _count(report, self._finish(batch, shards, ROLLBACK), ROLLBACK)
        return report

    def _redo(self, batch: pa.RecordBatch, shards: Int64s, redo: Redo, report: Redriven) -> None:
        stamp = None
        if self._replaces:
            batch, shards, stamp = self._journal.retake(ids_of(batch))
        codes, transactions = self._carrier.prepare(batch, shards)
        rows = np.flatnonzero(codes == 0)
        report.left += batch.num_rows - len(rows)
        if not len(rows):
            return
        prepared = replaced(batch, transaction=transactions).take(pa.array(rows))
        there = np.zeros(len(rows), np.bool_)
        with self._deciding(prepared, shards[rows], self._sessions, stamp, there) as session:
            redo(session, [_message(row) for row in prepared.to_pylist()])
        _count(report, self._finish(prepared, shards[rows], COMMIT), COMMIT)

    def _prepare_decided(self, batch: pa.RecordBatch, shards: Int64s, report: Redriven) -> None:
        """DECIDED: prepare what the broker could not be given when the business decided; it is committed like the
        others then."""
        codes, transactions = self._carrier.prepare(batch, shards)
        reach("driven.prepared-late")
        taken, refused = codes == 0, REFUSED[codes]
        ids = ids_of(batch)
        for row in np.flatnonzero(refused).tolist():
            _log.error("%s: decided here, but the broker refuses it: %s", ids[row].hex(), Code(codes[row]).name)
        self._journal.prepared(replaced(batch, transaction=transactions).filter(pa.array(taken)))
        self._journal.settle([Stage.DECIDED], (), some(ids, ~taken & ~refused), _answers(ids, codes, refused))
        report.stuck += int(refused.sum())
        report.left += int((~taken & ~refused).sum())

    def _roll_back_unknown(self, batch: pa.RecordBatch, shards: Int64s, report: Redriven) -> None:
        """ABANDONED: learn the transaction by preparing the same id again, then roll it back."""
        codes, transactions = self._carrier.prepare(batch, shards)
        refused = REFUSED[codes]  # then as now, or it is out of reach for ever: no one is left to roll it back
        self._journal.settle([Stage.ABANDONED], some(ids_of(batch), refused))
        report.rolled_back += int(refused.sum())
        rows = np.flatnonzero(codes == 0)
        report.left += batch.num_rows - len(rows) - int(refused.sum())
        if len(rows):
            ending = replaced(batch, transaction=transactions).take(pa.array(rows))
            _count(report, self._finish(ending, shards[rows], ROLLBACK), ROLLBACK)


def _answers(ids: list[bytes], codes: Codes, chosen: Flags) -> dict[bytes, Code]:
    """Return the broker's answers to the chosen rows."""
    return {ids[row]: Code(int(codes[row])) for row in np.flatnonzero(chosen).tolist()}


def sorted_out(codes: Codes, outcome: Outcome) -> tuple[Flags, Flags]:
    """Return which rows have come to their end, and which are surely refused: the broker holds the opposite
    decision."""
    ended = np.isin(codes, _ENDED[outcome])
    return ended, ~ended & REFUSED[codes]


def _count(report: Redriven, codes: Codes, outcome: Outcome) -> None:
    ended, contrary = (int(rows.sum()) for rows in sorted_out(codes, outcome))
    if outcome is COMMIT:
        report.committed += ended
    else:
        report.rolled_back += ended
    report.stuck += contrary
    report.left += len(codes) - ended - contrary


def _message(row: dict[str, Any]) -> Message:
    properties = None if row["properties"] is None else dict(row["properties"])
    delay = row["delay_us"] / 1e6
    return Message(
        row["topic"], row["body"], row["key"], row["tag"], properties, delay=delay, message_id=row["message_id"]
    )


def _note(problem: BaseException, another: Exception) -> None:
    """Tell on the first error that taking everything back failed too."""
    problem.add_note(f"taking it back failed as well, redrive() will do it: {another}")
