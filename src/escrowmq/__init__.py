"""EscrowMQ: a transactional message broker. The public names, grouped; heavy parts load when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from escrowmq.errors import Code, Corrupt, Denied, EscrowError, Fenced, Misuse, Overloaded, Rejected, Unknown
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

__version__ = "0.2.0"

_LAZY = {
    name: module
    for module, names in {
        "connecting": ("connect", "aconnect"),
        "client.bus": ("Bus",),
        "client.aio": ("AsyncBus",),
        "client.admin": ("Admin",),
        "client.producing.producer": ("Producer", "AsyncProducer"),
        "client.producing.transaction": ("Transaction", "AsyncTransaction"),
        "client.producing.results": ("Receipts", "EndResults"),
        "client.consuming.consumer": ("Consumer", "AsyncConsumer"),
        "client.consuming.received": ("Received", "ReceivedBatch"),
        "client.reading.reader": ("Reader", "AsyncReader", "ReadBatch"),
    }.items()
    for name in names
}

__all__ = [  # noqa: RUF022  # grouped, not sorted
    "connect", "aconnect",
    # what a bus gives
    "Bus", "Producer", "Transaction", "Consumer", "Reader", "Admin",
    "AsyncBus", "AsyncProducer", "AsyncTransaction", "AsyncConsumer", "AsyncReader",
    # messages and results
    "Message", "Receipt", "Receipts", "EndResults", "Received", "ReceivedBatch", "ReadBatch", "StoredMessage",
    # transactions
    "COMMIT", "ROLLBACK", "UNKNOWN", "Outcome", "Check", "CheckedMessage", "CheckPolicy",
    "TransactionId", "TransactionResult", "TransactionState",
    # errors
    "Code", "EscrowError", "Rejected", "Unknown", "Fenced", "Overloaded", "Corrupt", "Misuse", "Denied",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'escrowmq' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"escrowmq.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
