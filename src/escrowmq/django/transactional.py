"""The ``_tx`` functions of :mod:`escrowmq.outbox` inside ``transaction.atomic``.

``using`` is the alias of the database; None: the default one. Arguments, results and errors are those of the functions
of the same names there, and Misuse(NO_TRANSACTION) outside of an atomic block.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from escrowmq import outbox
from escrowmq.django.database import connection, engine_of
from escrowmq.model import Message
from escrowmq.outbox.barrier.binding import AnyTransaction
from escrowmq.settings import BrokerSettings


def send_tx(topic: str | Message, body: bytes | None = None, *, using: str | None = None, **options: Any) -> bytes:
    """Put one message into the outbox; return its 16-byte id. It is sent if and only if the atomic block commits.

    ``options``: ``key``, ``tag``, ``properties``, ``delay``, ``message_id``, ``limits``.
    """
    with connection(using) as lent:
        return outbox.send_tx(lent, topic, body, **options)


def send_batch_tx(
    messages: Iterable[Message] | pa.RecordBatch | pa.Table,
    *,
    limits: BrokerSettings | None = None,
    using: str | None = None,
) -> list[bytes]:
    """Put many messages into the outbox; return their ids in order."""
    with connection(using) as lent:
        return outbox.send_batch_tx(lent, messages, limits=limits)


def bind_tx(txn: AnyTransaction, *, branch: str = "", using: str | None = None) -> None:
    """Bind a message transaction to the atomic block: both commit, or neither. The producer's checker is
    :func:`barrier`.

    After Fenced(LATE_COMMIT) the innermost atomic block can only roll back.
    """
    with connection(using) as lent:
        outbox.bind_tx(lent, txn, branch=branch)


def barrier(*using: str, branch: str = "", wait: float = 0.5) -> outbox.Barrier:
    """Return the checker that answers from these databases (none: the default one), with connections of its own."""
    return outbox.Barrier(*map(engine_of, using or (None,)), branch=branch, wait=wait)


def claim_tx(
    message: Any = None,
    *,
    group: str,
    message_id: str | bytes | uuid.UUID | None = None,
    topic: str | None = None,
    using: str | None = None,
) -> bool:
    """Return whether this is the first time that ``group`` handles the message: True, continue; False, skip the
    effect."""
    with connection(using) as lent:
        return outbox.claim_tx(lent, message, group=group, message_id=message_id, topic=topic)


def claim_batch_tx(messages: Iterable[Any], group: str, *, using: str | None = None) -> list[bool]:
    """Claim many messages; return one answer per message."""
    with connection(using) as lent:
        return outbox.claim_batch_tx(lent, messages, group)
