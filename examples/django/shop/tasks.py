"""Tasks of the shop."""

from django.db import transaction

from escrowmq.django import claim_tx
from shop.models import Mail

try:
    from django.tasks import task
except ImportError:  # Django 5
    from django_tasks import task


@task(takes_context=True)
def mail(context, order: str) -> str:
    """Write a mail, once: a task whose worker was killed runs again, and finds its mark."""
    with transaction.atomic():
        if claim_tx(group="mail", message_id=context.task_result.id):
            Mail.objects.create(order=order)
            print(f"a mail for {order}", flush=True)
    return order
