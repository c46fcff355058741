"""The outbox and other database tools: local message table, receive log, barrier, relay. SQLAlchemy 2 sessions and
connections.

``_tx`` always means "inside your transaction": such a call writes through your session and commits nothing itself. Names
load when they are first used; without SQLAlchemy they raise Misuse(MISSING_PACKAGE).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from escrowmq.errors import Code, Misuse

if TYPE_CHECKING:
    from escrowmq.outbox import acts, aio, attention, callbacks, engines, handled, inbox, migrations, modes, tables
    from escrowmq.outbox.barrier import AsyncBarrier, Barrier, bind_batch_tx, bind_tx
    from escrowmq.outbox.callbacks import CallbackListener, confirm_batch_tx, confirm_tx, mark_done, report
    from escrowmq.outbox.inbox import claim_batch_tx, claim_tx
    from escrowmq.outbox.migrations import check_schema, ddl, include_object, migrate
    from escrowmq.outbox.modes import (
        BothReachConsumer,
        BothReachProducer,
        Compensating,
        Driven,
        OffsetConsumer,
        Slot,
        slots_of,
        split_topic,
    )
    from escrowmq.outbox.sending import send_batch_tx, send_tx
    from escrowmq.outbox.tables import State, metadata

_HOMES = {
    "barrier": ("bind_tx", "bind_batch_tx", "Barrier", "AsyncBarrier"),
    "sending": ("send_tx", "send_batch_tx"),
    "inbox": ("claim_tx", "claim_batch_tx"),
    "callbacks": ("confirm_tx", "confirm_batch_tx", "report", "mark_done", "CallbackListener"),
    "migrations": ("migrate", "check_schema", "ddl", "include_object"),
    "modes": (
        "Driven", "BothReachProducer", "BothReachConsumer", "Compensating", "OffsetConsumer", "Slot", "slots_of", "split_topic",
    ),
    "tables": ("metadata", "State"),
}  # fmt: skip
_LAZY = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022  # grouped, not sorted
    # the sender
    "send_tx",
    "send_batch_tx",
    # the sender of half messages
    "bind_tx",
    "bind_batch_tx",
    "Barrier",
    "AsyncBarrier",
    # the consumer
    "claim_tx",
    "claim_batch_tx",
    "inbox",
    # the consumer's word to the sender
    "confirm_tx",
    "confirm_batch_tx",
    "report",
    "mark_done",
    "CallbackListener",
    # driven by the producer (docs/modes.md)
    "Driven",
    "BothReachProducer",
    "BothReachConsumer",
    "Compensating",
    "OffsetConsumer",
    "Slot",
    "slots_of",
    "split_topic",
    # the tables
    "migrate",
    "check_schema",
    "ddl",
    "include_object",
    "metadata",
    "State",
    # rooms
    "acts",
    "aio",
    "attention",
    "callbacks",
    "engines",
    "handled",
    "migrations",
    "modes",
    "tables",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'escrowmq.outbox' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"escrowmq.outbox.{_LAZY.get(name, name)}")
    except ModuleNotFoundError as problem:
        if (problem.name or "").partition(".")[0] != "sqlalchemy":
            raise
        raise Misuse(
            Code.MISSING_PACKAGE,
            f"outbox.{name} needs SQLAlchemy, which is not installed",
            'python -m pip install "escrowmq[outbox]" (or [postgres], [mysql])',
        ) from problem
    value = getattr(module, name) if name in _LAZY else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
