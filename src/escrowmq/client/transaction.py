"""One transaction: half messages under one outcome. Blocking face."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING

from escrowmq.errors import Code, EscrowError, Misuse
from escrowmq.model import COMMIT, ROLLBACK, Message, Outcome, Receipt, TransactionId

if TYPE_CHECKING:
    from escrowmq.client.producer import Producer


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
    """

    __slots__ = ("_phase", "_producer", "id")

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._phase = Phase.ACTIVE
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

    def commit(self) -> Code:
        """Make the messages visible. COMMITTED or ALREADY_COMMITTED (OK if there are no messages); raises otherwise."""
        return self._end(COMMIT)

    def rollback(self) -> Code:
        """Drop the messages. ROLLED_BACK or ALREADY_ROLLED_BACK (OK if there are no messages); raises otherwise."""
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
            note(raised, problem)

    def __repr__(self) -> str:
        return f"<Transaction {self.id or 'without messages'}: {self._phase.value}>"


def note(raised: BaseException, problem: EscrowError) -> None:
    """Tell on the caller's exception that the rollback failed too."""
    raised.add_note(f"the rollback failed as well, the check-back will settle the transaction: {problem}")
