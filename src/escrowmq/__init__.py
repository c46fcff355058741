"""EscrowMQ: a transactional message broker. The public names, grouped; heavy parts load when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from escrowmq.errors import (
    Code,
    Corrupt,
    Denied,
    EscrowError,
    Fenced,
    Misuse,
    Overloaded,
    Rejected,
    Unknown,
)
from escrowmq.model import (
    COMMIT,
    ROLLBACK,
    UNKNOWN,
    Check,
    CheckedMessage,
    Message,
    Outcome,
    Receipt,
    TransactionId,
    TransactionResult,
    TransactionState,
)

if TYPE_CHECKING:
    from escrowmq.client.admin import Admin
    from escrowmq.client.aio import AsyncBus
    from escrowmq.client.async_consumer import AsyncConsumer
    from escrowmq.client.async_producer import AsyncProducer, AsyncTransaction
    from escrowmq.client.bus import Bus
    from escrowmq.client.consumer import Consumer, Received, ReceivedBatch
    from escrowmq.client.producer import Producer
    from escrowmq.client.reader import AsyncReader, ReadBatch, Reader
    from escrowmq.client.results import EndResults, Receipts
    from escrowmq.client.transaction import Transaction
    from escrowmq.connecting import aconnect, connect

__version__ = "0.1.0"

_LAZY = {
    "connect": "connecting",
    "aconnect": "connecting",
    "Bus": "client.bus",
    "Producer": "client.producer",
    "Transaction": "client.transaction",
    "Consumer": "client.consumer",
    "Received": "client.consumer",
    "ReceivedBatch": "client.consumer",
    "Reader": "client.reader",
    "ReadBatch": "client.reader",
    "AsyncReader": "client.reader",
    "Receipts": "client.results",
    "EndResults": "client.results",
    "Admin": "client.admin",
    "AsyncBus": "client.aio",
    "AsyncProducer": "client.async_producer",
    "AsyncTransaction": "client.async_producer",
    "AsyncConsumer": "client.async_consumer",
}

__all__ = [  # noqa: RUF022  # grouped, not sorted
    # connect
    "connect",
    "aconnect",
    # what a bus gives
    "Bus",
    "Producer",
    "Transaction",
    "Consumer",
    "Reader",
    "Admin",
    "AsyncBus",
    "AsyncProducer",
    "AsyncTransaction",
    "AsyncConsumer",
    "AsyncReader",
    # messages and results
    "Message",
    "Receipt",
    "Receipts",
    "EndResults",
    "Received",
    "ReceivedBatch",
    "ReadBatch",
    # transactions
    "COMMIT",
    "ROLLBACK",
    "UNKNOWN",
    "Outcome",
    "Check",
    "CheckedMessage",
    "TransactionId",
    "TransactionResult",
    "TransactionState",
    # errors
    "Code",
    "EscrowError",
    "Rejected",
    "Unknown",
    "Fenced",
    "Overloaded",
    "Corrupt",
    "Misuse",
    "Denied",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'escrowmq' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"escrowmq.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
