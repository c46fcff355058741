"""Tasks about orders."""

from __future__ import annotations

from django.db import transaction

from escrowmq.django import claim_tx
from till_app.models import Effect

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task

running = []
"""What tests put here is called by :func:`call`."""


@task
def note(order: int) -> int:
    """Note that the task of an order ran."""
    Effect.objects.create(order=order)
    return order


@task(takes_context=True)
def note_once(context, order: int) -> int:
    """Note it exactly once, in this database, however often the task runs."""
    with transaction.atomic():
        if claim_tx(group="note_once", message_id=context.task_result.id):
            Effect.objects.create(order=-order)
    return order


@task(queue_name="slow", takes_context=True)
def call(context, name: str) -> list:
    """Call what a test has put into :data:`running`."""
    return running[-1](context, name)


@task
async def double(number: int) -> int:
    """Run on an event loop."""
    return 2 * number


@task
def fail(text: str) -> None:
    """Fail."""
    raise ValueError(text)


@task
def answer_object() -> object:
    """Return what JSON cannot store."""
    return object()
