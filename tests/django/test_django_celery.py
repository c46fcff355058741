"""Celery's tasks in Django's transactions: with the process killed at every step, a task is sent if and only if its
order is committed."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import celery_child
import pytest
from celery import Celery
from django.core.management import call_command
from django.db import transaction
from django.test import override_settings
from till_app.models import Order

import escrowmq as mq
import forked
from escrowmq.django.celery import atomic
from escrowmq.django.models import OutboxMessage
from escrowmq_lab.servers.process import free_port

HERE = Path(__file__).parent


def orders_of(bodies: list[bytes]) -> list[int]:
    """The orders that tasks are about: the first of their arguments."""
    return sorted(json.loads(json.loads(body)["body"])[0][0] for body in bodies)


@pytest.fixture
def ship() -> Iterator[Any]:
    """The task of an application whose broker is away: all that is sent at once fails."""
    app = Celery("shop", broker_url=f"escrow://127.0.0.1:{free_port()}")
    app.conf.update(task_publish_retry=False, broker_connection_timeout=0.1)
    yield celery_child.task_of(app)
    app.close()


@pytest.mark.usefixtures("site")
def test_a_task_is_stored_and_undone_with_its_block(ship: Any) -> None:
    with atomic():
        Order.objects.create(id=1)
        ship.delay(1)
        with atomic():
            Order.objects.create(id=2)
            ship.delay(2)
            transaction.set_rollback(True)
    with transaction.atomic():
        with atomic():
            Order.objects.create(id=3)
            ship.apply_async((3,), countdown=5)
        transaction.set_rollback(True)
    stored = [bytes(body) for body in OutboxMessage.objects.values_list("body", flat=True)]
    assert orders_of(stored) == list(Order.objects.values_list("id", flat=True)) == [1]


@pytest.mark.usefixtures("site")
def test_another_broker_rolls_the_block_back() -> None:
    app = Celery("shop", broker_url="memory://")
    elsewhere = celery_child.task_of(app)

    def place() -> None:
        with atomic():
            Order.objects.create(id=1)
            elsewhere.delay(1)

    with pytest.raises(mq.Misuse, match="ship was sent at once"):
        place()
    app.close()
    assert not Order.objects.exists()


@pytest.mark.verify
def test_with_the_process_killed_at_every_step_tasks_and_orders_agree(site: str, tmp_path: Path) -> None:
    ran = forked.run([sys.executable, HERE / "celery_child.py", site], cwd=HERE)
    assert ran.returncode == 0, ran.stderr
    forks = [json.loads(line) for line in ran.stdout.splitlines()]
    assert forks[-1]["status"] == 0
    assert {fork["status"] for fork in forks[:-1]} == {-signal.SIGKILL}
    assert len(forks) >= 10, "every statement and publish is a step"
    committed = sorted(Order.objects.values_list("id", flat=True))
    assert 0 < len(committed) < len(forks), "some died before their commit, some behind it"
    url = f"file:{tmp_path / 'data'}"
    with override_settings(ESCROWMQ={"URL": url}):
        call_command("escrowmq_relay", once=True)
    with mq.connect(url) as bus:
        assert orders_of(bus.admin.read("celery").read_all().column("body").to_pylist()) == committed
