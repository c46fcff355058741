"""The producer: messages, transactions, decisions. Blocking face; ``aio.py`` has the one to await.

Quality of service, per producer:

- ``qos=0``, at most once: fire and forget. The message joins a bounded queue and is never sent again; what does not fit
  is dropped and counted in :attr:`Producer.dropped`. Its receipt has no id, position or offset.
- ``qos=1``, at least once: a success means durable. The client itself sends again under the same message ids after a
  lost connection, and the broker drops what it has; but a caller that repeats a call after Unknown makes a new message.
- ``qos=2``, exactly once into the queue: as 1, and the caller's repeats are de-duplicated too, by giving the same
  ``message_id`` each time: the caller's own id (``"order-17"``), or the ``message_id`` of the Unknown that was raised.
  This holds within the broker's ``dedup_window``. A message without an id gets one, as with 1.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.client.lanes.lanes import ThreadLane
from escrowmq.client.producing.deciding import AnyChecker
from escrowmq.client.producing.production import Production
from escrowmq.client.producing.results import EndResults, Receipts
from escrowmq.client.producing.transaction import Transaction
from escrowmq.client.producing.writers import BatchCommit, commit_batch, last_batch
from escrowmq.errors import Code, EscrowError, Misuse, Overloaded, error
from escrowmq.message.ids import id_bytes
from escrowmq.message.row import ROW_OVERHEAD
from escrowmq.model import COMMIT, ROLLBACK, Message, Outcome, Receipt, TransactionId, TransactionResult
from escrowmq.wire import Exchange

LocalTransaction = Callable[[Message, Any], Outcome | None]
CheckerT = TypeVar("CheckerT", bound=AnyChecker)


class Producer:
    """Sends messages of one producer group. Thread-safe: callers in many threads share batches.

    Made by :meth:`Bus.producer`. ``timeout`` is seconds until a call gives up with Unknown(TIMED_OUT).
    """

    def __init__(self, production: Production[ThreadLane]) -> None:
        self._production = production

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def group(self) -> str:
        """The producer group."""
        return self._production.group

    @property
    def instance(self) -> str:
        """The name under which a newer producer would fence this one."""
        return self._production.instance

    @property
    def dropped(self) -> int:
        """Messages dropped with qos=0."""
        return self._production.dropped

    # Plain messages

    def send(
        self,
        topic: str | Message,
        body: bytes | None = None,
        *,
        key: str | None = None,
        tag: str | None = None,
        properties: Mapping[str, str] | None = None,
        delay: float = 0.0,
        queue: int | None = None,
        message_id: str | bytes | uuid.UUID | None = None,
    ) -> Receipt:
        """Send one message (or a :class:`Message`); returns when it is durable.

        Raises Misuse or Rejected before anything leaves if it is unusable or over a limit; Rejected, Overloaded or
        Denied if the broker refused it; Unknown if there was no answer in time.
        """
        given = (key, tag, properties, delay, queue, message_id, None)
        number, row = self._row(Exchange.SEND, topic, body, given, None, None)
        lane = self._production.lane(Exchange.SEND, number)
        if self._production.qos == 0:
            try:
                lane.add(row, None, len(row[1]) + ROW_OVERHEAD)
            except Overloaded:
                self._production.dropped += 1
            return Receipt(row[5] or b"", row[0], row[6], -1)
        receipt: Receipt = lane.call(row, len(row[1]) + ROW_OVERHEAD)
        return receipt

    def send_batch(self, messages: Any, *, shard: int | None = None) -> Receipts:
        """Send many at once: an iterable of :class:`Message`, a record batch or a table with columns of OUTGOING.

        One typed result a row: refused rows do not stop the others. ``shard`` names the broker that all of them go to,
        whatever their keys (see :meth:`place`). Raises only when the whole is unusable or its outcome Unknown.
        """
        return self._batch(Exchange.SEND, messages, shard)

    def place(self, keys: pa.Array) -> npt.NDArray[np.uint32]:
        """The shard of the broker that messages with these keys (null: without one, by turns) would go to, one a row.

        For who must remember it: a message that is sent again must go to the broker that may have it already.
        """
        return self._production.place(keys)

    # Transactions

    def checker(self, decide: CheckerT) -> CheckerT:
        """Decorator: what answers the broker's questions about undecided transactions of this group.

        A function of one :class:`~escrowmq.model.Check`, or an object that answers a whole batch in one call: with
        ``decide_ids(ids)`` (columns in, columns out; see :class:`~escrowmq.client.producing.deciding.IdChecker`), such as
        ``outbox.Barrier``, or with ``decide_batch(checks)``. An exception is UNKNOWN, for a batch to all of its questions.
        """
        self._production.set_checker(decide)
        return decide

    def wait_until_listening(self, timeout: float = 10.0) -> bool:
        """Wait until every broker counts this producer among those to ask; False if not within ``timeout`` seconds."""
        return self._production.listening(timeout)

    def transaction(self) -> Transaction:
        """A transaction, as a context manager: leaving commits, an exception rolls back and goes on.

        Raises Misuse(NO_CHECKER) if the producer has no checker.
        """
        self._production.need_checker()
        return Transaction(self)

    def send_in_transaction(
        self, message: Message, local_transaction: LocalTransaction, arg: Any = None
    ) -> TransactionResult:
        """Send a half message, run ``local_transaction(message, arg)``, end the transaction with what it returns.

        An exception of the local transaction, or no Outcome, is UNKNOWN: the check-back will ask. Raises only if the
        half message was not taken; an end that failed is told in ``status`` and left to the check-back.
        """
        self._production.need_checker()
        receipt = self.prepare(message)
        assert receipt.transaction_id is not None  # a half message's receipt always has one
        problem: Exception | None = None
        try:
            outcome = local_transaction(message, arg)
        except Exception as raised:
            outcome, problem = None, raised
        if not isinstance(outcome, Outcome):
            outcome = Outcome.UNKNOWN
        try:
            status = self.end(receipt.transaction_id, outcome)
        except EscrowError as refused:
            status = refused.code
        return TransactionResult(receipt, outcome, status, problem)

    def prepare(
        self,
        topic: str | Message,
        body: bytes | None = None,
        *,
        key: str | None = None,
        tag: str | None = None,
        properties: Mapping[str, str] | None = None,
        delay: float = 0.0,
        check_immunity: float | None = None,
        queue: int | None = None,
        message_id: str | bytes | uuid.UUID | None = None,
        transaction_id: TransactionId | None = None,
    ) -> Receipt:
        """Send one half message: of a new transaction, or of ``transaction_id``. The receipt has the transaction's id."""
        self._production.need_checker()
        given = (key, tag, properties, delay, queue, message_id, check_immunity)
        number = None if transaction_id is None else self._broker(transaction_id.shard)
        join = None if transaction_id is None else bytes(transaction_id)
        number, row = self._row(Exchange.PREPARE, topic, body, given, number, join)
        lane = self._production.preparing[number] or self._production.lane(Exchange.PREPARE, number)
        receipt: Receipt = lane.call(row, len(row[1]) + ROW_OVERHEAD)
        if receipt.transaction_id is not None:
            self._production.router.learn_shard(receipt.transaction_id.shard, number)
        return receipt

    def prepare_batch(self, messages: Any, *, shard: int | None = None) -> Receipts:
        """Half messages, one transaction each, columns in; ``receipts.transactions`` goes into :meth:`end_batch`.

        ``shard`` as in :meth:`send_batch`.
        """
        self._production.need_checker()
        return self._batch(Exchange.PREPARE, messages, shard)

    def commit(self, transaction_id: TransactionId | str | bytes) -> Code:
        """Commit by id, from any process of the group. COMMITTED or ALREADY_COMMITTED; raises CONFLICT, and so on."""
        return require(self.end(transaction_id, COMMIT), Code.COMMITTED, Code.ALREADY_COMMITTED)

    def rollback(self, transaction_id: TransactionId | str | bytes) -> Code:
        """Roll back by id, from any process of the group. ROLLED_BACK or ALREADY_ROLLED_BACK; raises otherwise."""
        return require(self.end(transaction_id, ROLLBACK), Code.ROLLED_BACK, Code.ALREADY_ROLLED_BACK)

    def end(self, transaction_id: TransactionId | str | bytes, outcome: Outcome) -> Code:
        """End a transaction by id; what the broker answered. NOTED for UNKNOWN. Raises what is an error."""
        raw = id_bytes(transaction_id)
        if not isinstance(outcome, Outcome):
            raise Misuse(Code.BAD_ARGUMENT, f"{outcome!r} is not COMMIT, ROLLBACK or UNKNOWN")
        number = self._broker(int.from_bytes(raw[:4], "big"))
        session = self._production.sessions[number]
        if not session.ready(True):
            session.open(True)
        lane = self._production.ending[number] or self._production.lane(Exchange.END, number)
        code: Code = lane.call((raw, int(outcome)), 32)
        return code

    def end_batch(self, transaction_ids: Any, outcomes: Any) -> EndResults:
        """End many: ids as an Arrow column (``receipts.transactions``), NumPy records or an iterable; one outcome for
        all, or a column of them. One typed result a row; a null id is UNKNOWN_TRANSACTION."""
        ids, column = self._production.end_columns(transaction_ids, outcomes)
        parts = []
        waits = []
        for number, rows, piece in self._production.end_parts(ids, column, self._broker):
            self._production.sessions[number].open(True)
            waits.append(self._production.lane(Exchange.END, number).start_batch(piece))
            parts.append((number, rows, piece))
        return self._production.end_results(len(ids), parts, [wait() for wait in waits])

    # Writers of numbered batches

    def commit_batch(self, writer: str, batch: int, transaction_ids: Iterable[TransactionId]) -> BatchCommit:
        """Commit these transactions as batch number ``batch`` of ``writer``, all at once and only once.

        A repeat, also by another process and with other transactions (the batch was computed anew), finds the batch
        decided and publishes nothing. Whatever else is undecided in this producer group has lost and is rolled back, so
        a writer has a producer group of its own, and ends one batch before it begins the next. Raises CONFLICT, EXPIRED, WRONG_GROUP, ... with
        nothing changed at that broker; Unknown: try again with the same arguments.
        """
        return commit_batch(self._production, writer, batch, list(transaction_ids))

    def last_batch(self, writer: str) -> int | None:
        """The last batch of ``writer`` that every broker has decided."""
        return last_batch(self._production, writer)

    # The end

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything sent (qos=0 too) was answered; False if not within ``timeout`` (the producer's own)."""
        return self._production.drain(self._production.timeout if timeout is None else timeout)

    def close(self) -> None:
        """Stop answering checks, let what is on its way finish, refuse what comes."""
        self._production.close()

    # Helpers

    def _row(
        self,
        kind: Exchange,
        topic: str | Message,
        body: bytes | None,
        given: tuple[Any, ...],
        number: int | None,
        transaction: bytes | None,
    ) -> tuple[int, tuple[Any, ...]]:
        """The broker and the checked row of one message."""
        name, content, given = unfolded(topic, body, given)
        key, tag, properties, delay, wanted, identity, immunity = given
        if number is None:
            number = self._production.number(kind, key, identity)
        session = self._production.sessions[number]
        half = kind is Exchange.PREPARE
        if not session.ready(half):
            session.open(half or self._production.has_checker)
        row = session.checker.row(name, content, key, tag, properties, delay, wanted, identity, immunity, transaction)
        return number, row

    def _batch(self, kind: Exchange, messages: Any, shard: int | None) -> Receipts:
        production = self._production
        half = kind is Exchange.PREPARE
        number = None if shard is None else self._broker(shard)
        for session in production.sessions if number is None else [production.sessions[number]]:
            session.open(half or production.has_checker)
        batch, parts = production.parts(kind, messages, number)
        waits = [production.lane(kind, number).start_batch(piece) for number, _, piece in parts]
        answers: list[pa.RecordBatch] = [wait()[0] for wait in waits]
        return production.receipts(batch, parts, answers)

    def _broker(self, shard: int) -> int:
        known = self._production.router.known_shard(shard)
        return known if known is not None else self._production.router.of_shard(shard, self._production.timeout)


def unfolded(topic: Any, body: Any, given: tuple[Any, ...]) -> tuple[Any, Any, tuple[Any, ...]]:
    """Topic, body and (key, tag, properties, delay, queue, message_id, check_immunity), out of a Message if it is one."""
    if not isinstance(topic, Message):
        return topic, body, given
    if body is not None:
        raise Misuse(Code.BAD_ARGUMENT, "a Message has its own body")
    m = topic
    return m.topic, m.body, (m.key, m.tag, m.properties, m.delay, m.queue, m.message_id, m.check_immunity)


def require(code: Code, *wanted: Code) -> Code:
    """``code`` if it is as wanted; anything else that is not an error is a CONFLICT."""
    if code in wanted:
        return code
    raise error(Code.CONFLICT, f"the transaction stands as {code.name}")
