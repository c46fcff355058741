"""The admin pages: what they show, who may operate, and the record of it."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.db import connection, transaction
from django.test import Client, override_settings
from till_app import tasks

from escrowmq import django as escrow
from escrowmq.django.models import OutboxMessage
from escrowmq.outbox import State, acts

MESSAGES = "/admin/escrowmq/outboxmessage/"
WAITING = State.WAITING.value


@pytest.fixture
def everything(empty: str) -> str:
    """All tables of the project."""
    call_command("migrate", run_syncdb=True, verbosity=0)
    return empty


@pytest.fixture
def rows(everything: str) -> list[OutboxMessage]:
    """Two messages that need an operator, and one that is to be sent."""
    with transaction.atomic():
        for key in ("a", "b", "c"):
            escrow.send_tx("orders", f"<b>{key}</b>\xff".encode("latin-1"), key=key)
    OutboxMessage.objects.exclude(key="c").update(state=WAITING, attempts=4, error="BODY_TOO_LARGE: no\nmore")
    return list(OutboxMessage.objects.order_by("seq"))


def enter(*permissions: str, **user: Any) -> Client:
    """A client that is logged in as ann."""
    ann = User.objects.create_user("ann", is_staff=True, **user)
    ann.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(ann)
    return client


def act(client: Client, name: str, rows: list[OutboxMessage], why: str = "") -> str:
    form = {"action": name, "_selected_action": [row.pk for row in rows], "why": why}
    return client.post(MESSAGES, form, follow=True).content.decode().lower()


@override_settings(DEBUG=False)
def test_messages_are_listed_and_shown(rows: list[OutboxMessage]) -> None:
    client = enter(is_superuser=True)
    page = client.get(MESSAGES, {"state__exact": WAITING}).content.decode()
    assert [row.message_id.hex() in page for row in rows] == [True, True, False]
    assert "BODY_TOO_LARGE: no" in page
    shown = client.get(f"{MESSAGES}{rows[0].pk}/change/").content.decode()
    assert "&lt;b&gt;a&lt;/b&gt;\\xff" in shown
    assert client.get(f"{MESSAGES}add/").status_code == 403
    assert client.post(f"{MESSAGES}{rows[0].pk}/change/", {"topic": "other"}).status_code == 403
    assert client.get(MESSAGES, {"q": "TOO_LARGE"}).status_code == 200


@pytest.mark.parametrize("is_atomic", [False, True])
def test_operations_are_recorded_under_the_user(rows: list[OutboxMessage], is_atomic: bool) -> None:
    connection.settings_dict["ATOMIC_REQUESTS"] = is_atomic
    client = enter("view_outboxmessage", "operate_outboxmessage", "view_operatoraction")
    assert "retry: 1 ok" in act(client, "retry", rows[:1], "the limit was raised")
    assert "settle: 1 ok" in act(client, "settle", rows[1:2])
    told = act(client, "discard", [rows[0], rows[1]])
    assert "discard: 1 ok" in told
    assert "discard: 1 conflict" in told
    states = dict(OutboxMessage.objects.values_list("key", "state"))
    assert states == {"a": State.DISCARDED, "b": State.DONE, "c": State.PENDING}
    recorded = acts.list_acts(escrow.engine_of())
    assert [(one["act"], one["by"], one["why"]) for one in recorded] == [
        ("outbox.retry", "ann", "the limit was raised"),
        ("outbox.settle", "ann", None),
        ("outbox.discard", "ann", None),
    ]
    assert acts.verify_acts(escrow.engine_of())["broken"] == []
    page = client.get("/admin/escrowmq/operatoraction/").content.decode()
    assert "the limit was raised" in page
    assert "1 CONFLICT, 1 OK" in page
    assert "outbox.retry" in client.get("/admin/escrowmq/operatoraction/1/change/").content.decode()


def test_who_may_only_look_cannot_operate(rows: list[OutboxMessage]) -> None:
    client = enter("view_outboxmessage")
    assert rows[0].message_id.hex() in client.get(MESSAGES).content.decode()
    act(client, "retry", rows)
    assert OutboxMessage.objects.filter(state=WAITING).count() == 2
    assert acts.list_acts(escrow.engine_of()) == []
    assert client.get("/admin/escrowmq/operatoraction/").status_code == 403


def test_an_operation_that_fails_is_told(rows: list[OutboxMessage]) -> None:
    client = enter("view_outboxmessage", "operate_outboxmessage")
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE trans_act_head")
    told = act(client, "retry", rows[:1])
    assert "no_tables" in told
    assert OutboxMessage.objects.filter(state=WAITING).count() == 2


@pytest.mark.usefixtures("everything")
def test_tasks_are_listed() -> None:
    result = tasks.note.enqueue(1)
    client = enter("view_taskrecord")
    assert result.id in client.get("/admin/escrowmq/taskrecord/", {"status__exact": "READY"}).content.decode()
    assert "till_app.tasks.note" in client.get(f"/admin/escrowmq/taskrecord/{result.id}/change/").content.decode()
