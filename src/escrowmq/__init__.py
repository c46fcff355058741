"""Public names of EscrowMQ, a transactional message broker. Heavy modules load on first use."""

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
    CheckPolicy,
    Message,
    Outcome,
    Receipt,
    StoredMessage,
    TransactionId,
    TransactionResult,
    TransactionState,
)

if TYPE_CHECKING:
    from escrowmq.client.admin import Admin
    from escrowmq.client.aio import AsyncBus
    from escrowmq.client.bus import Bus
    from escrowmq.client.consuming.consumer import AsyncConsumer, Consumer
    from escrowmq.client.consuming.received import Received, ReceivedBatch
    from escrowmq.client.producing.producer import AsyncProducer, Producer
    from escrowmq.client.producing.results import EndResults, Receipts
    from escrowmq.client.producing.transaction import AsyncTransaction, Transaction
    from escrowmq.client.reading.reader import AsyncReader, ReadBatch, Reader
    from escrowmq.connecting import aconnect, connect

__version__ = "0.1.0"

_LAZY = {
    "connect": "connecting",
    "aconnect": "connecting",
    "Bus": "client.bus",
    "Producer": "client.producing.producer",
    "Transaction": "client.producing.transaction",
    "Consumer": "client.consuming.consumer",
    "Received": "client.consuming.received",
    "ReceivedBatch": "client.consuming.received",
    "Reader": "client.reading.reader",
    "ReadBatch": "client.reading.reader",
    "AsyncReader": "client.reading.reader",
    "Receipts": "client.producing.results",
    "EndResults": "client.producing.results",
    "Admin": "client.admin",
    "AsyncBus": "client.aio",
    "AsyncProducer": "client.producing.producer",
    "AsyncTransaction": "client.producing.transaction",
    "AsyncConsumer": "client.consuming.consumer",
}

__all__ = [  # noqa: RUF022  # grouped, not sorted
    # connect
    "connect",
    "aconnect",
    # handles of a bus
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
    "StoredMessage",
    # transactions
    "COMMIT",
    "ROLLBACK",
    "UNKNOWN",
    "Outcome",
    "Check",
    "CheckedMessage",
    "CheckPolicy",
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
