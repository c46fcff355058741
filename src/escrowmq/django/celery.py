"""Celery's tasks in Django's transactions (the extras ``celery`` and ``django``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import transaction

from escrowmq.celery.transactions import storing
from escrowmq.django.transactional import send_tx


@contextmanager
def atomic(using: str | None = None, *, savepoint: bool = True, durable: bool = False) -> Iterator[None]:
    """Context manager: ``transaction.atomic`` in which ``delay`` and ``apply_async`` of Celery's tasks write to the
    outbox. The relay sends these tasks if and only if the transaction commits.

    It applies to this thread. The broker may be away. Raises Misuse(BAD_ARGUMENT), and rolls back, if a task was sent
    at once because its application has another broker than EscrowMQ.
    """
    with transaction.atomic(using, savepoint, durable), storing(lambda message: send_tx(message, using=using)):
        yield
