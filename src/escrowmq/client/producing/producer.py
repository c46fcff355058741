"""The producer: messages, transactions, decisions. :class:`Producer` blocks, :class:`AsyncProducer` is awaited.

Quality of service, per producer:

- ``qos=0``, at most once: the message joins a bounded queue and is never sent again. If the queue is full it is dropped
  and counted in :attr:`Producer.dropped`. Its receipt has no id, position or offset.
- ``qos=1``, at least once: a success means durable. After a lost connection the client sends again under the same ids,
  which the broker de-duplicates; but a caller that repeats a call after Unknown makes a new message.
- ``qos=2``, exactly once into the queue, within the broker's ``dedup_window``: as 1, and repeats of the caller are
  de-duplicated by their ``message_id``: the caller's own (``"order-17"``), or that of the Unknown that was raised.

Ends of transactions, per producer:

- ``confirm="answered"`` (the default): the call returns when the decision is durable, or raises.
- ``confirm="oneway"``: the call returns ``Code.SENT`` at once. The client sends the end, and sends it again after a
  lost connection until ``timeout``; refused and unknown ends are only counted (:attr:`Producer.refused_ends`,
  :attr:`Producer.unknown_ends`). With a checker the broker checks a transaction whose end never came; without one it
  stays undecided until it is ended by id, or is parked. Batches of ends are always answered.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Generic, TypeVar, Unpack

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.client.lanes.blocking import AsyncCloses, Closes, blocking
from escrowmq.client.producing.checker import AnyChecker
from escrowmq.client.producing.ending import require
from escrowmq.client.producing.judging import name_of, outcome_of
from escrowmq.client.producing.oneway import Confirm
from escrowmq.client.producing.own_ids import AnyTransactionId, recall_message
from escrowmq.client.producing.production import Production
from escrowmq.client.producing.results import EndResults, Receipts
from escrowmq.client.producing.transaction import AsyncTransaction, Transaction, TransactionBase
from escrowmq.client.producing.writers import BatchCommit, commit_batch, last_batch
from escrowmq.errors import Code, EscrowError
from escrowmq.model import (
    HalfMessageOptions,
    Message,
    MessageOptions,
    Outcome,
    Receipt,
    TransactionId,
    TransactionResult,
)
from escrowmq.wire import Exchange

LocalTransaction = Callable[[Message, Any], Outcome | Awaitable[Outcome]]
"""What :meth:`Producer.send_in_transaction` runs: a function, or on an event loop a coroutine function."""
CheckerT = TypeVar("CheckerT", bound=AnyChecker)
TransactionT = TypeVar("TransactionT", bound=TransactionBase)


class ProducerBase(Generic[TransactionT]):
    """The base of both producers: everything that does not wait."""

    def __init__(self, production: Production, transaction: type[TransactionT]) -> None:
        self._production = production
        self._transaction = transaction

    @property
    def group(self) -> str:
        """The name of the producer group."""
        return self._production.group

    @property
    def instance(self) -> str:
        """The name of this producer in its group: a newer producer of the same name fences this one."""
        return self._production.instance

    @property
    def dropped(self) -> int:
        """The number of messages that were dropped with qos=0, because too many waited."""
        return self._production.dropped

    @property
    def confirm(self) -> Confirm:
        """Return whether single ends of transactions wait for the broker's answer ("answered") or do not ("oneway")."""
        return self._production.choice.confirm

    @property
    def refused_ends(self) -> int:
        """The number of oneway ends that surely had no effect: the transaction was decided the other way or has
        expired, the producer was fenced, the broker was away. The log names one now and then."""
        return self._production.tally.refused

    @property
    def unknown_ends(self) -> int:
        """The number of oneway ends without an answer within ``timeout`` or until :meth:`close`. They may have had
        effect."""
        return self._production.tally.unknown

    def checker(self, decide: CheckerT) -> CheckerT:
        """Register a checker (decorator): it answers the broker's check-backs for undecided transactions of this group.

        A function of one :class:`~escrowmq.model.Check`, or an object that answers a whole batch in one call: with
        ``decide_ids(ids)`` (columns in, columns out; see :class:`~escrowmq.client.producing.checker.IdChecker`), such
        as ``outbox.Barrier``, or with ``decide_batch(checks)``. On an event loop these may be coroutine functions. An
        exception (for a whole batch), or an answer that is no Outcome, is UNKNOWN; it is logged once per cause and
        counted in :attr:`unanswered`.
        """
        self._production.set_checker(decide)
        return decide

    @property
    def unanswered(self) -> int:
        """The number of checks without an answer: the checker raised, or returned no outcome. The broker repeats
        them."""
        return self._production.unanswered

    def attend(self, present: bool) -> None:
        """Stop (False) or resume (True) receiving checks, for example while the checker's database is away: a check
        that is answered UNKNOWN counts towards ``check_max``, a check without any producer does not."""
        self._production.attend(present)

    def transaction(self) -> TransactionT:
        """Return a new transaction, a context manager: leaving its block commits, an exception rolls back and
        propagates.

        Raises Misuse(NO_CHECKER) if the producer has no checker.
        """
        self._production.need_checker()
        return self._transaction(self._production)

    async def _close(self) -> None:
        await self._production.close()


class AsyncProducer(ProducerBase[AsyncTransaction], AsyncCloses):
    """The awaitable form of :class:`Producer`."""

    def __init__(self, production: Production) -> None:
        super().__init__(production, AsyncTransaction)

    # Plain messages

    async def send(self, topic: str | Message, body: bytes | None = None, **options: Unpack[MessageOptions]) -> Receipt:
        """Send one message (or a :class:`Message`); returns when it is durable.

        ``key``, ``tag``, ``properties``, ``delay`` (seconds), ``queue`` and ``message_id`` as in :class:`Message`.

        Raises Misuse or Rejected, before it is sent, if it is invalid or over a limit; Rejected, Overloaded or Denied
        if the broker refused it; Unknown without an answer in time.
        """
        if "check_immunity" in options:
            raise TypeError("send() got an unexpected keyword argument 'check_immunity'")
        return await self._production.produce(Exchange.SEND, topic, body, **options)

    async def send_batch(self, messages: Any, *, shard: int | None = None) -> Receipts:
        """Send many messages at once: an iterable of :class:`Message`, a record batch or a table with columns of
        OUTGOING.

        Returns one typed result per row: refused rows do not stop the others. ``shard``: the broker of all of them,
        whatever their keys (see :meth:`place`). Raises only if the whole batch is invalid or its outcome Unknown. The
        log may be written from the memory of a record batch: do not change it until this returns.
        """
        return await self._production.produce_batch(Exchange.SEND, messages, shard)

    async def place(self, keys: pa.Array) -> npt.NDArray[np.int64]:
        """Return the shard of the broker of messages with these keys, one per row; null keys go to the reachable
        brokers in rotation. A broker that was never reached has no shard yet: a number below -1 stands for its place in
        the URL, and is valid as a shard as long as the URL names the same brokers in the same order.

        For programs that must store it, because the repeat of a message must go to the same broker.
        """
        return await self._production.waiting.away(self._production.place, keys)

    async def recall(self, topic: str, message_id: str | bytes | uuid.UUID) -> bool:
        """Drop a delayed plain message, by its id, before its time has come: it never becomes visible. Returns when
        that is durable; False if it was recalled before.

        Raises Rejected(NOT_FOUND) if it has become visible, or there is none; Unknown without an answer in time: repeat
        the call. A message of a transaction is rolled back instead.
        """
        production = self._production
        return await production.waiting.away(recall_message, production.router, topic, message_id, production.timeout)

    # Transactions

    async def wait_until_listening(self, timeout: float = 10.0) -> bool:
        """Wait until every reachable broker sends checks to this producer; False if not within ``timeout`` seconds.
        Raises Fenced if a newer process has this producer's name and receives them instead."""
        return await self._production.waiting.away(self._production.listening, timeout)

    async def send_in_transaction(
        self, message: Message, local_transaction: LocalTransaction, arg: Any = None
    ) -> TransactionResult:
        """Send a half message, run ``local_transaction(message, arg)``, end the transaction with its result.

        An exception of the local transaction is UNKNOWN, and left to the check-back. If the end failed, ``status`` has
        its code and the check-back settles it; with ``confirm="oneway"`` it is SENT. Raises if the half message was
        refused; Misuse(NO_OUTCOME) if the local transaction returned no Outcome (None, True, "COMMIT"): then the
        transaction is left to the check-back.
        """
        production = self._production
        production.need_checker()
        receipt = await production.produce(Exchange.PREPARE, message)
        assert receipt.transaction_id is not None  # a half message's receipt always has one
        outcome, problem = Outcome.UNKNOWN, None
        try:
            returned = await production.waiting.returned(local_transaction(message, arg))
        except Exception as raised:
            problem = raised
        else:
            who = f"{name_of(local_transaction)}, the local transaction of {receipt.transaction_id},"
            outcome = outcome_of(returned, who)
        try:
            status = await production.end(receipt.transaction_id, outcome)
        except EscrowError as refused:
            status = refused.code
        return TransactionResult(receipt, outcome, status, problem)

    async def prepare(
        self,
        topic: str | Message,
        body: bytes | None = None,
        *,
        transaction_id: TransactionId | None = None,
        **options: Unpack[HalfMessageOptions],
    ) -> Receipt:
        """Send one half message: of a new transaction, or of ``transaction_id``. The receipt has the transaction's id.
        Other options as for :meth:`send`, and ``check_immunity``, seconds before the first check-back."""
        self._production.need_checker()
        return await self._production.produce(Exchange.PREPARE, topic, body, transaction_id, **options)

    async def prepare_batch(self, messages: Any, *, shard: int | None = None) -> Receipts:
        """Send many half messages, one transaction each; arguments and results as of :meth:`send_batch`. Pass
        ``receipts.transactions`` to :meth:`end_batch`."""
        self._production.need_checker()
        return await self._production.produce_batch(Exchange.PREPARE, messages, shard)

    async def commit(self, transaction_id: AnyTransactionId) -> Code:
        """Commit a transaction by id, from any process of the group. Returns COMMITTED or ALREADY_COMMITTED, or SENT
        with ``confirm="oneway"``. Raises CONFLICT and so on.

        The id is the transaction's, or the ``message_id`` that the producer gave to a half message of it (a text that
        is not the printed form of a transaction id), which is looked up in this producer group. Raises
        UNKNOWN_TRANSACTION if there is none, BAD_ARGUMENT, which names them, if there are several.
        """
        return require(Outcome.COMMIT, await self._production.end(transaction_id, Outcome.COMMIT))

    async def rollback(self, transaction_id: AnyTransactionId) -> Code:
        """Roll back a transaction by id, as :meth:`commit`. Returns ROLLED_BACK, ALREADY_ROLLED_BACK or SENT."""
        return require(Outcome.ROLLBACK, await self._production.end(transaction_id, Outcome.ROLLBACK))

    async def end(self, transaction_id: AnyTransactionId, outcome: Outcome, *, confirm: Confirm | None = None) -> Code:
        """End a transaction by id. Returns the broker's answer (NOTED for UNKNOWN) or raises its error.

        ``confirm`` (None: the producer's) ``"oneway"``: returns SENT at once; only the first call to a broker waits,
        for the session. Raises Overloaded if too many ends wait to be sent (QUEUE_FULL) or if the transaction's broker,
        of several, is known to be away (BROKER_AWAY); Unknown(CLOSED) after :meth:`close`.
        """
        return await self._production.end(transaction_id, outcome, confirm)

    async def end_batch(self, transaction_ids: Any, outcomes: Any) -> EndResults:
        """End many transactions: ids as an Arrow column (``receipts.transactions``), NumPy records or an iterable; one
        outcome for all, or a column. Returns one typed result per row (UNKNOWN_TRANSACTION for a null id), whatever
        ``confirm`` is."""
        return await self._production.end_batch(transaction_ids, outcomes)

    # Writers of numbered batches

    async def commit_batch(self, writer: str, batch: int, transaction_ids: Iterable[TransactionId]) -> BatchCommit:
        """Commit these transactions as batch number ``batch`` of ``writer``, all at once and only once.

        A repeat, also by another process and with other transactions (the batch was computed again), finds the batch
        decided and publishes nothing. All other undecided transactions of this producer group are rolled back, so a
        writer has a producer group of its own, and ends one batch before it begins the next. Raises CONFLICT, EXPIRED,
        WRONG_GROUP, ... with nothing changed at that broker; Unknown: try again with the same arguments.
        """
        ids = list(transaction_ids)
        return await self._production.waiting.away(commit_batch, self._production, writer, batch, ids)

    async def last_batch(self, writer: str) -> int | None:
        """Return the number of the last batch of ``writer`` that every broker has decided; None if there is none."""
        return await self._production.waiting.away(last_batch, self._production, writer)

    # The end

    async def flush(self, timeout: float | None = None) -> bool:
        """Wait until all sent messages and ends are answered; False if not within ``timeout`` (the producer's own)."""
        patience = self._production.timeout if timeout is None else timeout
        return await self._production.waiting.away(self._production.drain, patience)

    async def close(self) -> None:
        """Stop answering checks, refuse new requests, and wait for those in flight, at most ``timeout`` seconds."""
        await self._close()


class Producer(ProducerBase[Transaction], Closes):
    """Sends messages of one producer group. Thread-safe: callers in many threads share batches.

    Made by :meth:`Bus.producer`. ``timeout`` is seconds until a call gives up with Unknown(TIMED_OUT).
    """

    def __init__(self, production: Production) -> None:
        super().__init__(production, Transaction)

    send = blocking(AsyncProducer.send)
    send_batch = blocking(AsyncProducer.send_batch)
    recall = blocking(AsyncProducer.recall)
    place = blocking(AsyncProducer.place)
    wait_until_listening = blocking(AsyncProducer.wait_until_listening)
    send_in_transaction = blocking(AsyncProducer.send_in_transaction)
    prepare = blocking(AsyncProducer.prepare)
    prepare_batch = blocking(AsyncProducer.prepare_batch)
    commit = blocking(AsyncProducer.commit)
    rollback = blocking(AsyncProducer.rollback)
    end = blocking(AsyncProducer.end)
    end_batch = blocking(AsyncProducer.end_batch)
    commit_batch = blocking(AsyncProducer.commit_batch)
    last_batch = blocking(AsyncProducer.last_batch)
    flush = blocking(AsyncProducer.flush)
    close = blocking(AsyncProducer.close)
