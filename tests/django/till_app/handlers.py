"""Handlers of messages about orders, which ``escrowmq_work`` finds."""

from __future__ import annotations

from django.db import transaction

import escrowmq as mq
from escrowmq import django as escrow
from escrowmq.handlers import App
from escrowmq.platform.failpoints import reach
from till_app.models import Payment

app = App()


@app.handler("orders", group="pay", once=escrow.Database(), lease=1.0)
def pay(body: bytes, message: mq.Received) -> None:
    """Write a payment, and a message of the outbox about it; fail for an order "poison"."""
    Payment.objects.create(order=int(message.key or 0))
    reach("till.paid")
    if body == b"poison":
        raise ValueError("poison")
    escrow.send_tx("payments", body, key=message.key)
    transaction.on_commit(lambda: reach("till.committed"))


@app.handler("payments", group="count")
async def count(message: mq.Received) -> None:
    """Write with the asynchronous ORM, whose connections are on a thread of their own."""
    await Payment.objects.acreate(order=-int(message.key or 0))
