"""One transaction: half messages that are committed or rolled back together."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from enum import Enum
from types import TracebackType
from typing import Unpack

from escrowmq.client.lanes.blocking import blocking
from escrowmq.client.producing.ending import require
from escrowmq.client.producing.judging import name_of, outcome_of
from escrowmq.client.producing.production import Production
from escrowmq.errors import Code, EscrowError, Misuse, Rejected, Unknown
from escrowmq.model import COMMIT, ROLLBACK, UNKNOWN, HalfMessageOptions, Message, Outcome, Receipt, TransactionId
from escrowmq.platform import failpoints
from escrowmq.wire import Exchange

_log = logging.getLogger(__name__)

Ask = Callable[[TransactionId], Outcome | Awaitable[Outcome]]
"""Returns the outcome of a transaction: a function, or on an event loop a coroutine function."""


class Phase(Enum):
    """The state of a transaction object in this process."""

    ACTIVE = "active"
    ENDED = "ended"
    LEFT = "left to the check-back"


class TransactionBase:
    """The base of both transactions."""

    __slots__ = ("_asks", "_phase", "_production", "id")

    def __init__(self, production: Production) -> None:
        self._production = production
        self._phase = Phase.ACTIVE
        self._asks: list[Ask] = []
        self.id: TransactionId | None = None

    def settle_by(self, ask: Ask) -> None:
        """Bind the outcome to a function: from now on every end calls it first, and ends as it returns.

        ``ask(id)`` returns COMMIT or ROLLBACK only if that can no longer change, else UNKNOWN (or raises): then nothing
        is decided, and the check-back will ask. Anything else raises Misuse(NO_OUTCOME) at the end. Several functions
        must agree. On an event loop it may be a coroutine function.
        """
        self._need_active()
        self._asks.append(ask)

    def leave_undecided(self) -> None:
        """End this object without deciding the transaction: the check-back decides it, as after a crash here."""
        self._need_active()
        self._phase = Phase.LEFT

    async def _end(self, outcome: Outcome) -> Code:
        self._need_active()
        self._phase = Phase.ENDED
        if self.id is None:
            return Code.OK
        if self._asks:
            try:
                answers = {await self._ask(ask, self.id) for ask in self._asks}
            except Misuse:
                self._phase = Phase.LEFT
                raise
            agreed = answers.pop() if len(answers) == 1 else UNKNOWN
            failpoints.reach("transaction.told")
            if agreed is UNKNOWN:
                self._phase = Phase.LEFT
                text = "the database has not decided the transaction yet; the check-back will ask it again"
                hint = "commit the database session before the block of the transaction is left"
                raise Unknown(Code.TIMED_OUT, text, hint)
            if agreed is not outcome:
                await self._production.end(self.id, agreed)
                if agreed is COMMIT:
                    raise Rejected(Code.CONFLICT, "the database had committed: the messages are committed too")
                text = "the database transaction did not commit: the messages are rolled back too"
                raise Rejected(Code.CONFLICT, text, "commit the session inside the block of the transaction")
        return require(outcome, await self._production.end(self.id, outcome))

    async def _ask(self, ask: Ask, transaction: TransactionId) -> Outcome:
        try:
            answer = await self._production.waiting.returned(ask(transaction))
        except Exception:
            _log.exception("the database could not be asked about %s; the check-back will", transaction)
            return UNKNOWN
        return outcome_of(answer, f"{name_of(ask)}, asked about {transaction},")

    def _need_active(self) -> None:
        if self._phase is not Phase.ACTIVE:
            raise Misuse(Code.BAD_ARGUMENT, f"this transaction is {self._phase.value}", "begin a new transaction")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id or 'without messages'}: {self._phase.value}>"


class AsyncTransaction(TransactionBase):
    """The awaitable form of :class:`Transaction`: ``async with producer.transaction() as txn``."""

    __slots__ = ()

    async def send(
        self, topic: str | Message, body: bytes | None = None, **options: Unpack[HalfMessageOptions]
    ) -> Receipt:
        """Send a half message of this transaction; it is durable when this returns, and invisible until the commit.
        Raises as :meth:`Producer.send`."""
        self._need_active()
        receipt = await self._production.produce(Exchange.PREPARE, topic, body, self.id, **options)
        if self.id is None:
            self.id = receipt.transaction_id
        return receipt

    async def commit(self) -> Code:
        """Commit the transaction: its messages become visible. Returns COMMITTED or ALREADY_COMMITTED (OK if there are
        no messages), or SENT, without waiting, if the producer has ``confirm="oneway"``.

        Bound to a database: Rejected(CONFLICT) if that did not commit (the messages are rolled back),
        Unknown(TIMED_OUT) if it has not decided yet (left to the check-back).
        """
        return await self._end(COMMIT)

    async def rollback(self) -> Code:
        """Roll back the transaction: its messages never become visible. Returns ROLLED_BACK or ALREADY_ROLLED_BACK (OK
        if there are no messages), SENT as :meth:`commit`.

        Bound to a database: Rejected(CONFLICT) if that did commit (the messages are committed).
        """
        return await self._end(ROLLBACK)

    async def __aenter__(self) -> AsyncTransaction:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._phase is not Phase.ACTIVE:
            return
        if raised is None:
            if self.id is None or self._asks:
                await self._end(COMMIT)
            else:  # the common case, without another coroutine
                self._phase = Phase.ENDED
                require(COMMIT, await self._production.end(self.id, COMMIT))
            return
        try:
            await self._end(ROLLBACK)
        except EscrowError as problem:  # the caller's own exception matters more
            if self._asks and problem.code is Code.CONFLICT:
                raised.add_note(f"the messages follow the database: {problem}")
            else:
                raised.add_note(f"the rollback failed as well, the check-back will settle the transaction: {problem}")


class Transaction(TransactionBase):
    """Half messages that become visible together, or never.

    A context manager: leaving commits, an exception rolls back and continues. ``id`` is None until the first message is
    durable in escrow. If the outcome of the COMMIT itself is not known, Unknown is raised; the transaction is then
    settled by the check-back, or by ``producer.commit(txn.id)``. One thread at a time.

    Bound to a database (:meth:`settle_by`, ``outbox.bind_tx``) it ends as the database does, even after an exception, a
    commit whose answer was lost, or blocks left in the wrong order.
    """

    __slots__ = ()

    send = blocking(AsyncTransaction.send)
    commit = blocking(AsyncTransaction.commit)
    rollback = blocking(AsyncTransaction.rollback)
    __exit__ = blocking(AsyncTransaction.__aexit__)

    def __enter__(self) -> Transaction:
        return self
