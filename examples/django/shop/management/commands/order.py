"""``manage.py order ID``: place an order."""

import os
import signal

from django.core.management.base import BaseCommand
from django.db import transaction
from shop.models import Order
from shop.tasks import mail

from escrowmq.django import send_tx


class Command(BaseCommand):
    def add_arguments(self, parser):
        parser.add_argument("id")
        parser.add_argument("--crash", choices=["before-commit", "after-commit"])

    def handle(self, *, id, crash, **_):
        with transaction.atomic():
            Order.objects.create(id=id)
            mail.enqueue(id)  # runs if and only if the order is committed
            send_tx("orders", b"one book", key=id)  # and so is this message sent
            if crash == "before-commit":
                os.kill(os.getpid(), signal.SIGKILL)
        if crash == "after-commit":
            os.kill(os.getpid(), signal.SIGKILL)
        print(f"order {id} is placed")
