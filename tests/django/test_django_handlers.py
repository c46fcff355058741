"""Handlers in Django apps: what ``escrowmq_work`` runs, and effects once in Django's own transaction."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import override_settings
from test_django_kills import HERE, command, stop
from till_app import handlers
from till_app.models import Payment

import escrowmq as mq
import forked
from escrowmq import django as escrow
from escrowmq.django.handlers import find_apps
from escrowmq.django.models import OutboxMessage
from escrowmq.handlers import App

STEPS = ("till.paid:1", "till.paid:2", "till.committed:1", "till.committed:2")


def payments() -> list[int]:
    return sorted(Payment.objects.values_list("order", flat=True))


@pytest.mark.verify
def test_handlers_killed_around_their_commit_have_each_effect_once(
    site: str, tmp_path: Path, eventually: Callable[..., Any]
) -> None:
    """The payment, the mark of the order and the message about the payment are one transaction of Django."""
    url = f"file:{tmp_path / 'data'}"
    numbers = list(range(1, 21))
    with mq.connect(url) as bus:
        bus.producer("shop").send_batch([mq.Message("orders", b"x", key=str(number)) for number in numbers])
    words = [sys.executable, HERE / "manage.py", site, "escrowmq_work", "--handlers", "--url", url]
    for step in STEPS:
        killed = forked.run(words, cwd=HERE, env={**os.environ, "ESCROWMQ_FAILPOINT": step})
        assert killed.returncode == -9, (step, killed.stderr)
    with command(site, *words[3:], "--relay") as process:
        eventually(lambda: {*numbers, *(-number for number in numbers)} <= set(payments()), timeout=120)
        eventually(lambda: not OutboxMessage.objects.exists(), timeout=120)
        stop(process)
    assert [number for number in payments() if number > 0] == numbers
    assert {-number for number in payments() if number < 0} == set(numbers)
    assert not OutboxMessage.objects.exists()


@pytest.mark.usefixtures("site")
def test_a_handler_that_fails_leaves_nothing_and_repeats_have_no_effect(bus: mq.Bus) -> None:
    producer = bus.producer("shop")
    producer.send_batch([mq.Message("orders", b"poison", key="1"), mq.Message("orders", b"x", key="2")])
    ran = {(one.message.key, one.outcome) for one in handlers.app.run_available(bus) if one.handler == "pay"}
    assert {("1", "retried"), ("2", "acked")} <= ran <= {("1", "retried"), ("1", "dead"), ("2", "acked")}
    assert (payments(), OutboxMessage.objects.count()) == ([2], 1)
    bus.admin.reset_group("pay", "earliest")
    handlers.app.run_available(bus)
    assert (payments(), OutboxMessage.objects.count()) == ([2], 1)


def test_handlers_are_found_once_and_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "again", handlers.app, raising=False)
    assert find_apps() == [handlers.app]
    other = App()

    @other.handler("orders", group="pay")
    def pay(body: bytes) -> None: ...

    monkeypatch.setattr(handlers, "other", other, raising=False)
    with pytest.raises(mq.Misuse, match="two handlers have the group 'pay'"):
        find_apps()


def test_a_coroutine_function_cannot_use_transactions_of_django() -> None:
    async def handle(body: bytes) -> None:
        pass

    with pytest.raises(mq.Misuse, match="a coroutine function needs"):
        App().handler("orders", group="g", once=escrow.Database())(handle)


def test_a_site_without_handlers_and_tasks_has_no_work(tmp_path: Path) -> None:
    url = f"file:{tmp_path / 'data'}"
    with override_settings(INSTALLED_APPS=["escrowmq.django"]), pytest.raises(CommandError, match="no handlers"):
        call_command("escrowmq_work", handlers=True, url=url)
