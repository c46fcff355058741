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
| STUCK | the broker holds the opposite decision, or is none of those given | an operator decides (``stuck.py``) |

P4 moves STORED to COMMITTING inside the business transaction and demands that it does: a row that another process has
abandoned meanwhile fails the business transaction (Fenced). Whether a business transaction that failed has committed
after all (a connection lost in COMMIT) is read from the row, whose lock waits for it; it is never guessed. Merged mode
has no STORED: a row comes with the business change, and a prepare whose process died before that leaves with the
broker's log.

A message whose broker is away is decided all the same: the business change needs no broker's answer first, as long as
the prepare surely did not leave (BROKER_AWAY). Where that is not known, the business does not happen, because the half
message might exist without its row.

P7 follows P6 alone: a row is deleted only when the broker has confirmed the end.
"""

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
from escrowmq.outbox.modes.journal import Int64s, Journal, Stage, ids_of, pick, replace_columns, to_batch
from escrowmq.outbox.session import transaction_of
from escrowmq.outbox.tables import trans_driven
from escrowmq.outbox.targets.seam import NOT_APPLIED, REFUSED, Codes
from escrowmq.platform.failpoints import reach

_log = logging.getLogger(__name__)

Business = Callable[[Session], object]
Flags = npt.NDArray[np.bool_]
Redo = Callable[[Session, Sequence[Message]], object]
Sessions = Callable[[], Session]

_ENDED: dict[Outcome, list[int]] = {
    COMMIT: [*STANDS_COMMITTED],
    # a transaction that the broker does not know, or that expired, is as good as rolled back: it will never be seen
    ROLLBACK: [*STANDS_ROLLED_BACK, Code.EXPIRED, Code.UNKNOWN_TRANSACTION],
}
_STAGES = {COMMIT: [Stage.COMMITTING], ROLLBACK: [Stage.ROLLING_BACK, Stage.ABANDONED]}
"""The stages of rows that end with each outcome."""


class Carrier(Protocol):
    """Sends prepares and decisions. Codes as in :mod:`escrowmq.outbox.modes.senders`; raises only Misuse."""

    def place(self, batch: pa.RecordBatch) -> Int64s:
        """Return the shard that each row belongs to, which is stored with it; -1 with one destination only."""

    def prepare(self, batch: pa.RecordBatch, shards: Int64s) -> tuple[Codes, pa.Array]:
        """Send each row's message to its shard as a prepare: not yet decided. Returns a code and a transaction id per
        row (null: it has none); a row that is prepared again under its message id gets the same transaction."""

    def end(self, batch: pa.RecordBatch, shards: Int64s, outcome: Outcome) -> Codes:
        """Send the decision ``outcome`` on each row to its shard. Returns a code per row, as :meth:`Producer.end_batch`
        does: COMMITTED or ROLLED_BACK (not OK), ALREADY_COMMITTED or ALREADY_ROLLED_BACK if it was decided so before,
        otherwise why it is not decided so."""


@dataclass(frozen=True, slots=True)
class DrivenResult:
    """The result for one message whose business change is committed.

    ``code`` is COMMITTED or ALREADY_COMMITTED when the message is published. Any other code is why it is not yet: its
    row is COMMITTING, and :meth:`Driving.redrive` will finish it (or STUCK, for an operator: CONFLICT, EXPIRED, ...).
    """

    message_id: bytes
    transaction_id: TransactionId | None
    code: Code

    @property
    def done(self) -> bool:
        """Return whether the message is published."""
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
        """Return whether all messages of the batch are published."""
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
    """The broker did not answer, or accepts nothing now: the next redrive tries again."""
    stuck: int = 0
    """The broker holds the opposite decision, or is none of those given: an operator must decide."""

    def add(self, codes: Codes, outcome: Outcome) -> None:
        """Add the broker's answers (``codes``) to decisions of one outcome to the counts."""
        ended, contrary = (int(rows.sum()) for rows in classify(codes, outcome))
        if outcome is COMMIT:
            self.committed += ended
        else:
            self.rolled_back += ended
        self.stuck += contrary
        self.left += len(codes) - ended - contrary


class Driving:
    """The steps, over one carrier and one table. Thread-safe if the engine and the carrier are."""

    def __init__(
        self,
        carrier: Carrier,
        engine: sa.Engine,
        group: str,
        *,
        merged: bool = False,
        replaces: bool = False,
        sessions: Sessions | None = None,
    ) -> None:
        self._carrier = carrier
        self._engine = engine
        self._sessions = sessions or sessionmaker(engine)
        self._journal = Journal(engine, group)
        self._merged, self._replaces = merged, replaces

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close what this object opened. Messages in progress stay in the table."""

    # The way forward

    def send(self, message: Message, business: Business) -> DrivenResult:
        """Send one message with one local transaction: both, or neither. As :meth:`run_batch`."""
        return self.run_batch([message], business)[0]

    def run_batch(self, messages: Any, business: Business) -> DrivenResults:
        """Send many messages with one local transaction ``business(session)``: all, or none of them.

        ``messages``: any form of a producer's batch. One SQL statement per step, one request per step and broker. An
        exception of ``business`` rolls everything back and is raised. When this returns, the business change is
        committed.

        Raises what the broker or the database raised before the business transaction (then nothing happened: a row that
        is left will be rolled back), Fenced if another process abandoned the messages meanwhile.
        """
        results: list[DrivenResults] = []
        with self.transaction(messages, results) as session:
            business(session)
        return results[0]

    @contextmanager
    def transaction(
        self, messages: Any, results: list[DrivenResults] | None = None, *, sessions: Sessions | None = None
    ) -> Iterator[Session]:
        """Context manager: prepare, then yield the session of the business transaction; leaving commits both.

        Do not commit the session yourself. ``messages`` may be one Message; ``results`` receives a DrivenResults;
        ``sessions``: another factory for this transaction, on the same database.
        """
        batch = to_batch(messages)
        shards = self._carrier.place(batch)
        stamp = None
        if not self._merged:
            with self._engine.begin() as connection:
                if self._replaces:
                    shards, stamp = self._journal.replace(connection, batch, shards)
                else:
                    self._journal.insert(connection, batch, shards, Stage.STORED)
            reach("driven.stored")
        prepared, codes = self._prepare(batch, shards)
        away = codes != 0
        with self._decide(prepared, shards, sessions or self._sessions, stamp, away) as session:
            yield session
        reach("driven.decided")
        if not away.all():
            codes[~away] = self._finish(prepared.filter(pa.array(~away)), shards[~away], COMMIT)
        if results is not None:
            results.append(DrivenResults(prepared, codes))

    def _prepare(self, batch: pa.RecordBatch, shards: Int64s) -> tuple[pa.RecordBatch, Codes]:
        """Send the prepares (P2, P3). Returns the batch with its transactions, and a code per row: OK, or BROKER_AWAY
        where nothing was sent.

        Any other code takes the whole batch back, and is raised.
        """
        codes, transactions = self._carrier.prepare(batch, shards)
        prepared = replace_columns(batch, transaction=transactions)
        reach("driven.prepared")
        wrong = codes[(codes != 0) & (codes != Code.BROKER_AWAY)]
        if len(wrong):
            problem = error(Code(int(wrong[0])))
            try:
                self._take_back(prepared, shards, codes)
            except (EscrowError, SQLAlchemyError) as another:
                _note(problem, another)
            raise problem
        return prepared, codes

    def _take_back(self, batch: pa.RecordBatch, shards: Int64s, codes: Codes) -> None:
        """Undo a partly failed prepare by its ``codes``: delete rows surely not accepted, roll back those accepted,
        leave the rest ABANDONED."""
        taken = codes == 0
        if not self._merged:
            self._journal.abandon(ids_of(batch), gone=pick(ids_of(batch), NOT_APPLIED[codes]))
        if taken.any():
            self._finish(batch.filter(pa.array(taken)), shards[taken], ROLLBACK)

    @contextmanager
    def _decide(
        self, batch: pa.RecordBatch, shards: Int64s, sessions: Sessions, stamp: int | None, away: Flags
    ) -> Iterator[Session]:
        """Context manager: the session of the business transaction (P4), in which the rows become COMMITTING, or
        DECIDED where the broker is ``away``; ``stamp`` as in :meth:`Journal.decide`. Commits it at the end.

        If it fails, the messages are rolled back and the error is raised, unless the rows show that it committed after
        all.
        """
        ours = False
        try:
            with sessions() as session, session.begin():
                # first, so that no business work is wasted, and the rows are locked until its end
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
                raise  # another process has the rows: there is nothing to take back
            try:
                committed = self._resolve(batch, shards, stamp)
            except (EscrowError, SQLAlchemyError) as another:
                _note(problem, another)
                raise problem from None
            if not committed:
                raise
            _log.warning("a business transaction had committed although its end raised %r", problem)

    def _resolve(self, batch: pa.RecordBatch, shards: Int64s, stamp: int | None) -> bool:
        """Return whether a failed business transaction committed after all, as the rows show; if not, roll the messages
        back, unless another process has abandoned them."""
        if self._merged:
            # the same rows as the business transaction's: the insert waits for one that is still committing, and one
            # that comes late fails on them
            try:
                with self._engine.begin() as connection:
                    self._journal.insert(connection, batch, shards, Stage.ROLLING_BACK)
            except Rejected:
                return True
        else:
            with self._engine.begin() as connection:
                stages = self._journal.undo(connection, batch, stamp)
            found = {stages.get(i) for i in ids_of(batch)}
            if found and found <= {Stage.COMMITTING, Stage.DECIDED}:
                return True
            if not found <= {Stage.ROLLING_BACK}:
                return False  # another process has abandoned them, and ends them
        self._finish(batch, shards, ROLLBACK)
        return False

    # The end

    def _finish(self, batch: pa.RecordBatch, shards: Int64s, outcome: Outcome) -> Codes:
        """Send ``outcome`` to the broker and delete the rows that it confirms (P5, P6, P7). Returns the broker's codes.
        A row stays if a retry may succeed; it is STUCK if it is surely refused."""
        codes = self._carrier.end(batch, shards, outcome)
        if outcome is COMMIT and self._replaces:
            codes = self._end_again(batch, shards, codes)
        reach("driven.ended")
        ids = ids_of(batch)
        ended, contrary = classify(codes, outcome)
        stuck = _answers(ids, codes, contrary)
        for identity, code in stuck.items():
            _log.error("%s: the broker answers %s to %s", identity.hex(), code.name, outcome.name)
        try:
            self._journal.settle(_STAGES[outcome], pick(ids, ended), pick(ids, ~ended & ~contrary), stuck)
        except SQLAlchemyError as problem:
            _log.warning("rows that have come to their end are left for the next redrive: %s", problem)
        reach("driven.deleted")
        return codes

    def _end_again(self, batch: pa.RecordBatch, shards: Int64s, codes: Codes) -> Codes:
        """Prepare and commit again the COMMITTING rows whose transaction was replaced by a late prepare of a process
        that can decide nothing any more: the row counts. Returns the codes of the whole batch, with theirs replaced."""
        rows = np.flatnonzero(codes == Code.CONFLICT)
        if not len(rows):
            return codes
        piece = batch.take(pa.array(rows))
        answers, transactions = self._carrier.prepare(piece, shards[rows])
        before = np.array(piece.column("transaction").to_pylist(), object)
        moved = (answers == 0) & (before != np.array(transactions.to_pylist(), object))
        if moved.any():
            again = replace_columns(piece, transaction=transactions).filter(pa.array(moved))
            self._journal.commit(again, Stage.COMMITTING)
            codes = codes.copy()
            codes[rows[moved]] = self._carrier.end(again, shards[rows[moved]], COMMIT)
        return codes

    # After a restart

    def redrive(self, redo: Redo | None = None, *, older_than: float = 0.0) -> Redriven:
        """Finish all rows of this group in the table; return the counts.

        Call it at the start and regularly. Stored messages without a decision are abandoned, unless ``redo(session,
        messages)`` repeats their business change: then they are prepared again under the same id and decided with it.
        While other processes of the group are running, ``older_than`` (seconds, by the database's clock) must exceed
        their slowest business transaction, otherwise theirs is fenced.
        """
        report, pages = Redriven(), self._journal.pages
        for batch, shards in pages(Stage.STORED, older_than):
            if redo is None:
                self._journal.abandon(ids_of(batch))
            else:
                self._redo(batch, shards, redo, report)
        for batch, shards in pages(Stage.ABANDONED):
            self._roll_back_unknown(batch, shards, report)
        for batch, shards in pages(Stage.DECIDED, older_than):
            self._prepare_decided(batch, shards, report)
        for batch, shards in pages(Stage.COMMITTING, older_than):
            report.add(self._finish(batch, shards, COMMIT), COMMIT)
        for batch, shards in pages(Stage.ROLLING_BACK):
            report.add(self._finish(batch, shards, ROLLBACK), ROLLBACK)
        return report

    def _redo(self, batch: pa.RecordBatch, shards: Int64s, redo: Redo, report: Redriven) -> None:
        stamp = None
        if self._replaces:
            batch, shards, stamp = self._journal.retake(ids_of(batch))
        codes, transactions = self._carrier.prepare(batch, shards)
        taken = codes == 0
        report.left += int((~taken).sum())
        if not taken.any():
            return
        prepared, shards = replace_columns(batch, transaction=transactions).filter(pa.array(taken)), shards[taken]
        none_away = np.zeros(len(shards), np.bool_)
        with self._decide(prepared, shards, self._sessions, stamp, none_away) as session:
            redo(session, [_to_message(**row) for row in prepared.to_pylist()])
        report.add(self._finish(prepared, shards, COMMIT), COMMIT)

    def _prepare_decided(self, batch: pa.RecordBatch, shards: Int64s, report: Redriven) -> None:
        """Prepare DECIDED rows now, because the broker was away when the business decided, and make them COMMITTING;
        those refused become STUCK. Adds to ``report``."""
        codes, transactions = self._carrier.prepare(batch, shards)
        reach("driven.prepared-late")
        taken, refused = codes == 0, REFUSED[codes]
        left = ~taken & ~refused
        ids = ids_of(batch)
        stuck = _answers(ids, codes, refused)
        for identity, code in stuck.items():
            _log.error("%s: decided here, but the broker refuses it: %s", identity.hex(), code.name)
        self._journal.commit(replace_columns(batch, transaction=transactions).filter(pa.array(taken)), Stage.DECIDED)
        self._journal.settle([Stage.DECIDED], (), pick(ids, left), stuck)
        report.stuck += len(stuck)
        report.left += int(left.sum())

    def _roll_back_unknown(self, batch: pa.RecordBatch, shards: Int64s, report: Redriven) -> None:
        """Prepare ABANDONED rows again under the same id, to learn their transactions, and roll these back; delete rows
        whose prepare is refused. Adds to ``report``."""
        codes, transactions = self._carrier.prepare(batch, shards)
        refused = REFUSED[codes]  # then as now, or it is out of reach for ever: there is nothing to roll back
        taken = codes == 0
        self._journal.settle([Stage.ABANDONED], pick(ids_of(batch), refused))
        report.rolled_back += int(refused.sum())
        report.left += int((~taken & ~refused).sum())
        if taken.any():
            ending = replace_columns(batch, transaction=transactions).filter(pa.array(taken))
            report.add(self._finish(ending, shards[taken], ROLLBACK), ROLLBACK)


def _answers(ids: list[bytes], codes: Codes, chosen: Flags) -> dict[bytes, Code]:
    """Return the broker's code by message id, for the rows where ``chosen`` is True."""
    return {ids[row]: Code(int(codes[row])) for row in np.flatnonzero(chosen).tolist()}


def classify(codes: Codes, outcome: Outcome) -> tuple[Flags, Flags]:
    """Return two masks of the answers to decisions of ``outcome``: the rows that have ended so, and those surely
    refused, because the broker holds the opposite decision."""
    ended = np.isin(codes, _ENDED[outcome])
    return ended, ~ended & REFUSED[codes]


def _to_message(*, topic: str, body: bytes, key: Any, tag: Any, properties: Any, **others: Any) -> Message:
    properties = None if properties is None else dict(properties)
    delay, message_id = others["delay_us"] / 1e6, others["message_id"]
    return Message(topic, body, key, tag, properties, delay=delay, message_id=message_id)


def _note(problem: BaseException, another: Exception) -> None:
    """Add a note to ``problem``: taking the messages back failed too, with ``another``."""
    problem.add_note(f"taking it back failed as well, redrive() will do it: {another}")
