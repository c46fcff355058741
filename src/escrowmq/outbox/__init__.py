"""The outbox and other database tools: local message table, receive log, barrier, relay. For SQLAlchemy 2.

``_tx`` always means "inside your transaction": such a call writes through your session and commits nothing itself.
Names load at their first use; without SQLAlchemy they raise Misuse(MISSING_PACKAGE).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from escrowmq.platform.extras import from_extra

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
        "Driven", "BothReachProducer", "BothReachConsumer", "Compensating", "OffsetConsumer", "Slot", "slots_of",
        "split_topic",
    ),
    "tables": ("metadata", "State"),
}  # fmt: skip
_MODULES = ("acts", "aio", "attention", "callbacks", "engines", "handled", "inbox", "migrations", "modes", "tables")
_LAZY = {name: home for home, names in _HOMES.items() for name in names} | {name: name for name in _MODULES}

__all__ = [  # noqa: RUF022  # grouped, not sorted
    # the sender, and the sender of half messages
    "send_tx", "send_batch_tx", "bind_tx", "bind_batch_tx", "Barrier", "AsyncBarrier",
    # the consumer, and its callbacks to the sender
    "claim_tx", "claim_batch_tx", "confirm_tx", "confirm_batch_tx", "report", "mark_done", "CallbackListener",
    # driven by the producer (docs/modes.md)
    "Driven", "BothReachProducer", "BothReachConsumer", "Compensating", "OffsetConsumer", "Slot", "slots_of",
    "split_topic",
    # the tables
    "migrate", "check_schema", "ddl", "include_object", "metadata", "State",
    # modules
    "acts", "aio", "attention", "callbacks", "engines", "handled", "inbox", "migrations", "modes", "tables",
]  # fmt: skip

__getattr__ = from_extra(__name__, _LAZY, needs={"sqlalchemy": "outbox"}, who="outbox.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
