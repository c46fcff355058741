"""One transaction: half messages under one outcome. Blocking face."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING

from escrowmq.errors import Code, EscrowError, Misuse, Rejected, Unknown
from escrowmq.model import COMMIT, ROLLBACK, UNKNOWN, Message, Outcome, Receipt, TransactionId
from escrowmq.platform import failpoints

if TYPE_CHECKING:
    from escrowmq.client.producing.producer import Producer

_log = logging.getLogger(__name__)


class Phase(Enum):
    """Where a transaction object stands, as this process knows it."""

    ACTIVE = "active"
    ENDED = "ended"
    LEFT = "left to the check-back"


class Transaction:
    """Half messages that become visible together, or never.

    A context manager: leaving commits, an exception rolls back and goes on. ``id`` is None until the first message is
    durable in escrow. Where the outcome of the COMMIT itself is not known, Unknown is raised; the transaction is then
    settled by the check-back, or by ``producer.commit(txn.id)``. One thread at a time.

    Once it is bound to a database (:meth:`settle_by`, ``outbox.bind_tx``) it ends as the database says, whatever this process
    believes: an exception, a commit whose answer was lost, blocks left in the wrong order cannot make the two differ.
    """

    __slots__ = ("_asks", "_phase", "_producer", "id")

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._phase = Phase.ACTIVE
        self._asks: list[Callable[[TransactionId], Outcome]] = []
        self.id: TransactionId | None = None

    def send(
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
    ) -> Receipt:
        """Put a message into escrow; durable there when this returns. Raises as :meth:`Producer.send` does."""
        self._need_active()
        receipt = self._producer.prepare(
            topic,
            body,
            key=key,
            tag=tag,
            properties=properties,
            delay=delay,
            check_immunity=check_immunity,
            queue=queue,
            message_id=message_id,
            transaction_id=self.id,
        )
        if self.id is None:
            self.id = receipt.transaction_id
        return receipt

    def settle_by(self, ask: Callable[[TransactionId], Outcome]) -> None:
        """Bind the outcome to an answer: from now on every end first asks, and does what it is told.

        ``ask(id)`` answers COMMIT or ROLLBACK only when that can no longer change, and UNKNOWN (or an exception) otherwise:
        then nothing is decided and the check-back will ask. Of several, all must say the same.
        """
        self._need_active()
        self._asks.append(ask)

    def commit(self) -> Code:
        """Make the messages visible. COMMITTED or ALREADY_COMMITTED (OK if there are no messages); raises otherwise.

        Bound to a database: Rejected(CONFLICT) if that did not commit (the messages are rolled back), Unknown(TIMED_OUT) if
        it has not decided yet (left to the check-back).
        """
        return self._end(COMMIT)

    def rollback(self) -> Code:
        """Drop the messages. ROLLED_BACK or ALREADY_ROLLED_BACK (OK if there are no messages); raises otherwise.

        Bound to a database: Rejected(CONFLICT) if that did commit (the messages are committed), Unknown(TIMED_OUT) as above.
        """
        return self._end(ROLLBACK)

    def leave_undecided(self) -> None:
        """Leave the outcome to the check-back, as a crash at this place would."""
        self._need_active()
        self._phase = Phase.LEFT

    def _end(self, outcome: Outcome) -> Code:
        self._need_active()
        self._phase = Phase.ENDED
        if self.id is None:
            return Code.OK
        if self._asks:
            told = agreed([_asked(ask, self.id) for ask in self._asks])
            failpoints.reach("transaction.told")
            if told is UNKNOWN:
                self._phase = Phase.LEFT
                raise undecided()
            if told is not outcome:
                self._producer.end(self.id, told)
                raise contradicted(told)
        return self._producer.commit(self.id) if outcome is COMMIT else self._producer.rollback(self.id)

    def _need_active(self) -> None:
        if self._phase is not Phase.ACTIVE:
            raise Misuse(Code.BAD_ARGUMENT, f"this transaction is {self._phase.value}", "begin a new transaction")

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, _: TracebackType | None) -> None:
        if self._phase is not Phase.ACTIVE:
            return
        if raised is None:
            self.commit()
            return
        try:
            self.rollback()
        except EscrowError as problem:  # the caller's own exception matters more
            note(raised, problem, bool(self._asks))

    def __repr__(self) -> str:
        return f"<Transaction {self.id or 'without messages'}: {self._phase.value}>"


def note(raised: BaseException, problem: EscrowError, bound: bool) -> None:
    """Tell on the caller's exception what became of the messages, if that was no rollback."""
    if bound and problem.code is Code.CONFLICT:
        raised.add_note(f"the messages follow the database: {problem}")
    else:
        raised.add_note(f"the rollback failed as well, the check-back will settle the transaction: {problem}")


def agreed(told: Iterable[Outcome]) -> Outcome:
    """What all say; UNKNOWN if they differ."""
    (one, *others) = set(told)
    return UNKNOWN if others else one


def undecided() -> Unknown:
    """The error where a database could not say what became of a transaction that is bound to it."""
    return Unknown(
        Code.TIMED_OUT,
        "the database has not decided the transaction yet; the check-back will ask it again",
        "commit the database session before the block of the transaction is left",
    )


def contradicted(told: Outcome) -> Rejected:
    """The error where the database says the opposite of what the caller wanted; the broker was told what it says."""
    if told is COMMIT:
        return Rejected(Code.CONFLICT, "the database had committed: the messages are committed too")
    return Rejected(
        Code.CONFLICT,
        "the database transaction did not commit: the messages are rolled back too",
        "commit the session inside the block of the transaction",
    )


def failed_ask(transaction: TransactionId) -> Outcome:
    """For an ask that raised; call while handling its exception."""
    _log.exception("the database could not be asked about %s; the check-back will", transaction)
    return UNKNOWN


def _asked(ask: Callable[[TransactionId], Outcome], transaction: TransactionId) -> Outcome:
    try:
        return ask(transaction)
    except Exception:
        return failed_ask(transaction)
