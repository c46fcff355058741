"""The producer: messages, transactions, decisions; :class:`Producer` blocks, :class:`AsyncProducer` is awaited.

Quality of service, per producer:

- ``qos=0``, at most once: fire and forget. The message joins a bounded queue and is never sent again; what does not fit
  is dropped and counted in :attr:`Producer.dropped`. Its receipt has no id, position or offset.
- ``qos=1``, at least once: a success means durable. The client itself sends again under the same message ids after a
  lost connection, and the broker drops what it has; but a caller that repeats a call after Unknown makes a new message.
- ``qos=2``, exactly once into the queue: as 1, and the caller's repeats are de-duplicated too, by giving the same
  ``message_id`` each time: the caller's own id (``"order-17"``), or the ``message_id`` of the Unknown that was raised.
  This holds within the broker's ``dedup_window``. A message without an id gets one, as with 1.

And whether the end of a transaction is waited for, per producer:

- ``confirm="answered"`` (the default): what ends a transaction returns when the broker has answered, so the decision is
  durable, or raises.
- ``confirm="oneway"``: it returns ``Code.SENT`` once the end was added to what is about to leave. The client sends it,
  and sends it again after a lost connection until ``timeout``; nobody learns by the call whether the decision was
  taken. It is counted: :attr:`Producer.refused_ends`, :attr:`Producer.unknown_ends`. With a checker the broker asks
  about a transaction whose end never came; without one it stays undecided until it is ended by id, or is parked.
  Batches of ends are always answered.
"""

from __future__ import annotations

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
from escrowmq.client.producing.own_ids import AnyTransactionId
from escrowmq.client.producing.production import Production
from escrowmq.client.producing.results import EndResults, Receipts
from escrowmq.client.producing.transaction import AsyncTransaction, Transaction, TransactionBase
from escrowmq.client.producing.writers import BatchCommit, commit_batch, last_batch
from escrowmq.errors import Code, EscrowError
from escrowmq.model import (
    COMMIT,
    ROLLBACK,
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

    @property
    def confirm(self) -> Confirm:
        """Whether single ends are waited for, "answered", or not, "oneway"."""
        return self._production.choice.confirm

    @property
    def refused_ends(self) -> int:
        """Ends that nobody waited for and that surely did not take effect: the transaction was decided the other way or
        has expired, the producer was fenced, the broker was away. The log names one now and then."""
        return self._production.tally.refused

    @property
    def unknown_ends(self) -> int:
        """Ends that nobody waited for and that were not answered within ``timeout`` or until :meth:`close`: they may
        have taken effect."""
        return self._production.tally.unknown

    def checker(self, decide: CheckerT) -> CheckerT:
        """Register a checker (decorator): it answers the broker's check-backs for undecided transactions of this group.

        A function of one :class:`~escrowmq.model.Check`, or an object that answers a whole batch in one call: with
        ``decide_ids(ids)`` (columns in, columns out; see :class:`~escrowmq.client.producing.checker.IdChecker`), such
        as ``outbox.Barrier``, or with ``decide_batch(checks)``. An exception is UNKNOWN, for a batch to all of its
        questions; so is an answer that is no Outcome. Both are logged once per cause and counted in :attr:`unanswered`.
        On an event loop these may be coroutine functions.
        """
        self._production.set_checker(decide)
        return decide

    @property
    def unanswered(self) -> int:
        """Questions that the checker left open: it raised, or gave what is no outcome. The broker asks them again."""
        return self._production.unanswered

    def attend(self, present: bool) -> None:
        """Stop being asked for a while, or be asked again, if what the checker needs is away: a question that is
        answered UNKNOWN counts towards ``check_max``, a question that finds no producer to ask does not."""
        self._production.attend(present)

    def transaction(self) -> TransactionT:
        """Return a transaction, as a context manager: leaving commits, an exception rolls back and continues.

        Raises Misuse(NO_CHECKER) if the producer has no checker.
        """
        self._production.need_checker()
        return self._transaction(self._production)

    async def _close(self) -> None:
        await self._production.close()


class AsyncProducer(ProducerBase[AsyncTransaction], AsyncCloses):
    """As :class:`Producer`, to await."""

    def __init__(self, production: Production) -> None:
        super().__init__(production, AsyncTransaction)

    # Plain messages

    async def send(self, topic: str | Message, body: bytes | None = None, **options: Unpack[MessageOptions]) -> Receipt:
        """Send one message (or a :class:`Message`); returns when it is durable.

        ``key``, ``tag``, ``properties``, ``delay`` (seconds), ``queue`` and ``message_id`` as in :class:`Message`.

        Raises Misuse or Rejected before anything leaves if it is unusable or over a limit; Rejected, Overloaded or
        Denied if the broker refused it; Unknown if there was no answer in time.
        """
        if "check_immunity" in options:
            raise TypeError("send() got an unexpected keyword argument 'check_immunity'")
        return await self._production.produce(Exchange.SEND, topic, body, **options)

    async def send_batch(self, messages: Any, *, shard: int | None = None) -> Receipts:
        """Send many at once: an iterable of :class:`Message`, a record batch or a table with columns of OUTGOING.

        One typed result per row: refused rows do not stop the others. ``shard`` names the broker that all of them go
        to, whatever their keys (see :meth:`place`). Raises only when the whole is unusable or its outcome Unknown.
        """
        return await self._production.produce_batch(Exchange.SEND, messages, shard)

    async def place(self, keys: pa.Array) -> npt.NDArray[np.int64]:
        """Return the shard of the broker that messages with these keys would go to, one per row; those with a null key
        go to the brokers that are there in rotation. A broker that was never met has no shard yet: a number below -1
        stands for its place in the URL, and means the same wherever a shard is asked for, as long as the URL names the
        same brokers in the same order.

        For programs that must remember it: a message that is sent again must go to the broker that may have it already.
        """
        return await self._production.waiting.away(self._production.place, keys)

    # Transactions

    async def wait_until_listening(self, timeout: float = 10.0) -> bool:
        """Wait until every broker that is there counts this producer among those to ask; False if not within
        ``timeout`` seconds.

        Raises Fenced if a newer process has this producer's name: it is asked in this one's place.
        """
        return await self._production.waiting.away(self._production.listening, timeout)

    async def send_in_transaction(
        self, message: Message, local_transaction: LocalTransaction, arg: Any = None
    ) -> TransactionResult:
        """Send a half message, run ``local_transaction(message, arg)``, end the transaction with what it returns.

        An exception of the local transaction is UNKNOWN: the check-back will ask. If the end failed, ``status`` has its
        code and the check-back settles it; with ``confirm="oneway"`` it is SENT. Raises if the half message was not
        taken; Misuse(NO_OUTCOME) if the local transaction gave anything but an Outcome, such as None, True or "COMMIT":
        the transaction is left undecided then, and the check-back asks.
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

        The other options as for :meth:`send`, and ``check_immunity``, seconds before the first check-back.
        """
        self._production.need_checker()
        return await self._production.produce(Exchange.PREPARE, topic, body, transaction_id, **options)

    async def prepare_batch(self, messages: Any, *, shard: int | None = None) -> Receipts:
        """Return half messages, one transaction each, columns in; ``receipts.transactions`` goes into
        :meth:`end_batch`.

        ``shard`` as in :meth:`send_batch`.
        """
        self._production.need_checker()
        return await self._production.produce_batch(Exchange.PREPARE, messages, shard)

    async def commit(self, transaction_id: AnyTransactionId) -> Code:
        """Commit by id, from any process of the group. COMMITTED or ALREADY_COMMITTED; raises CONFLICT, and so on.
        SENT, and raises as :meth:`end`, with ``confirm="oneway"``.

        The id is the transaction's, or the ``message_id`` that the producer gave to a half message of it (a text that
        is not the printed form of a transaction id): that is looked up in this producer group first. Raises
        UNKNOWN_TRANSACTION if there is none, BAD_ARGUMENT, which names them, if there are several.
        """
        return require(COMMIT, await self._production.end(transaction_id, COMMIT))

    async def rollback(self, transaction_id: AnyTransactionId) -> Code:
        """Roll back by id, the transaction's or a message's as for :meth:`commit`, from any process of the group.
        ROLLED_BACK or ALREADY_ROLLED_BACK; raises otherwise. SENT as for :meth:`commit`."""
        return require(ROLLBACK, await self._production.end(transaction_id, ROLLBACK))

    async def end(self, transaction_id: AnyTransactionId, outcome: Outcome, *, confirm: Confirm | None = None) -> Code:
        """End a transaction by id; what the broker answered. NOTED for UNKNOWN. Raises what is an error.

        ``confirm`` is the producer's own unless it is given. ``"oneway"``: SENT, at once, whatever becomes of it; only
        the first call to a broker waits, for the session. Raises Overloaded if too many wait to be sent (QUEUE_FULL) or
        if the transaction's broker, of several, is known to be away (BROKER_AWAY); Unknown(CLOSED) after :meth:`close`.
        """
        return await self._production.end(transaction_id, outcome, confirm)

    async def end_batch(self, transaction_ids: Any, outcomes: Any) -> EndResults:
        """End many: ids as an Arrow column (``receipts.transactions``), NumPy records or an iterable; one outcome for
        all, or a column of them. One typed result per row; a null id is UNKNOWN_TRANSACTION. Always answered, whatever
        ``confirm`` is."""
        return await self._production.end_batch(transaction_ids, outcomes)

    # Writers of numbered batches

    async def commit_batch(self, writer: str, batch: int, transaction_ids: Iterable[TransactionId]) -> BatchCommit:
        """Commit these transactions as batch number ``batch`` of ``writer``, all at once and only once.

        A repeat, also by another process and with other transactions (the batch was computed anew), finds the batch
        decided and publishes nothing. Whatever else is undecided in this producer group has lost and is rolled back, so
        a writer has a producer group of its own, and ends one batch before it begins the next. Raises CONFLICT,
        EXPIRED, WRONG_GROUP, ... with nothing changed at that broker; Unknown: try again with the same arguments.
        """
        ids = list(transaction_ids)
        return await self._production.waiting.away(commit_batch, self._production, writer, batch, ids)

    async def last_batch(self, writer: str) -> int | None:
        """Return the last batch of ``writer`` that every broker has decided."""
        return await self._production.waiting.away(last_batch, self._production, writer)

    # The end

    async def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything sent (qos=0 and ``confirm="oneway"``, too) was answered; False if not within
        ``timeout`` (the producer's own)."""
        patience = self._production.timeout if timeout is None else timeout
        return await self._production.waiting.away(self._production.drain, patience)

    async def close(self) -> None:
        """Stop answering checks, let what is on its way finish, refuse what comes."""
        await self._close()


class Producer(ProducerBase[Transaction], Closes):
    """Sends messages of one producer group. Thread-safe: callers in many threads share batches.

    Made by :meth:`Bus.producer`. ``timeout`` is seconds until a call gives up with Unknown(TIMED_OUT).
    """

    def __init__(self, production: Production) -> None:
        super().__init__(production, Transaction)

    send = blocking(AsyncProducer.send)
    send_batch = blocking(AsyncProducer.send_batch)
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
