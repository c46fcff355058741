"""Frozen values made quickly: tens of thousands of receipts a second, where a frozen dataclass's own ``__init__`` shows.

A frozen dataclass sets each field through ``object.__setattr__``. Here a plain twin with the same slots is filled, and
then made to be of the frozen class; the result cannot be told from the other.
"""

from __future__ import annotations

from typing import Any

from escrowmq.model import Receipt, TransactionId


class _Receipt:
    __slots__ = ("message_id", "offset", "position", "queue", "topic", "transaction_id")

    def __init__(
        self,
        message_id: bytes,
        topic: str,
        queue: int,
        position: int,
        offset: int | None,
        transaction_id: TransactionId | None,
    ) -> None:
        self.message_id = message_id
        self.topic = topic
        self.queue = queue
        self.position = position
        self.offset = offset
        self.transaction_id = transaction_id


class _TransactionId:
    __slots__ = ("epoch", "position", "shard")

    def __init__(self, shard: int, epoch: int, position: int) -> None:
        self.shard = shard
        self.epoch = epoch
        self.position = position


def make_receipt(
    message_id: bytes,
    topic: str,
    queue: int,
    position: int,
    offset: int | None,
    transaction_id: TransactionId | None,
) -> Receipt:
    """A :class:`~escrowmq.model.Receipt`."""
    receipt: Any = _Receipt(message_id, topic, queue, position, offset, transaction_id)
    receipt.__class__ = Receipt
    return receipt  # type: ignore[no-any-return]


def make_transaction_id(shard: int, epoch: int, position: int) -> TransactionId:
    """A :class:`~escrowmq.model.TransactionId`."""
    identity: Any = _TransactionId(shard, epoch, position)
    identity.__class__ = TransactionId
    return identity  # type: ignore[no-any-return]
