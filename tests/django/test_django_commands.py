"""``manage.py escrowmq_relay``, ``escrowmq_work`` and ``escrowmq_purge``: results and errors."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from io import StringIO
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import transaction
from django.test import override_settings
from django.utils import timezone
from till_app import tasks

import escrowmq as mq
from escrowmq import django as escrow
from escrowmq.django.management.commands import escrowmq_purge
from escrowmq.django.models import OutboxMessage, TaskRecord


@pytest.mark.usefixtures("site")
def test_a_relay_drains_the_table_once(tmp_path: Path) -> None:
    url = f"file:{tmp_path / 'data'}"
    with transaction.atomic():
        escrow.send_tx("orders", b"x")
    with override_settings(ESCROWMQ={"URL": url, "RELAY": {"keep": 3600, "workers": 1}}):
        call_command("escrowmq_relay", once=True)
    assert list(OutboxMessage.objects.values_list("state", flat=True)) == [1]
    with transaction.atomic():
        escrow.send_tx("orders", b"y" * (5 << 20), limits=mq.settings.BrokerSettings(max_body_bytes=8 << 20))
    with pytest.raises(CommandError, match="not sent: 1 messages"):
        call_command("escrowmq_relay", once=True, to=url)


@pytest.mark.usefixtures("site")
def test_errors_name_what_is_wrong(tmp_path: Path) -> None:
    url = f"file:{tmp_path / 'data'}"
    with pytest.raises(ImproperlyConfigured, match="no broker"):
        call_command("escrowmq_relay", once=True)
    with pytest.raises(CommandError, match="no_such_scheme"):
        call_command("escrowmq_relay", to="no_such_scheme:x")
    with pytest.raises(CommandError, match="QUEUES"):
        call_command("escrowmq_work", queue=["other"], url=url)
    with pytest.raises(CommandError, match="at least 1"):
        call_command("escrowmq_work", threads=0, url=url)
    with override_settings(ESCROWMQ={"URI": url}), pytest.raises(ImproperlyConfigured, match="'URI'"):
        call_command("escrowmq_work")
    with override_settings(ESCROWMQ={"RELAY": {"kept": 1}}), pytest.raises(CommandError, match="kept"):
        call_command("escrowmq_relay", to=url)


@pytest.mark.usefixtures("empty")
def test_missing_tables_are_an_error_at_the_start(tmp_path: Path) -> None:
    url = f"file:{tmp_path / 'data'}"
    with pytest.raises(CommandError):
        call_command("escrowmq_work", url=url)
    with pytest.raises(CommandError, match="NO_TABLES"):
        call_command("escrowmq_relay", to=url)


@pytest.mark.usefixtures("site")
def test_a_purge_deletes_finished_tasks_of_some_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(escrowmq_purge, "CHUNK", 2)
    now = timezone.now()
    for number in range(7):
        tasks.note.enqueue(number)
    for row, days in zip(TaskRecord.objects.order_by("pk"), (1, 2, 3, 4, 5, 6, None), strict=True):
        if days is not None:
            status = "FAILED" if days % 2 else "SUCCESSFUL"
            TaskRecord.objects.filter(pk=row.pk).update(status=status, finished_at=now - timedelta(days=days))
    told = StringIO()
    call_command("escrowmq_purge", older_than=2.5, stdout=told)
    assert told.getvalue() == "deleted: 4\n"
    assert TaskRecord.objects.count() == 3
    with pytest.raises(CommandError):
        call_command("escrowmq_purge", older_than=-1.0)


def test_a_site_without_the_extra_is_told_what_to_install() -> None:
    """Not a traceback of Django that ends with a package of ours."""
    program = (
        "import sys; sys.modules['sqlalchemy'] = None\n"
        "import django; from django.conf import settings\n"
        "settings.configure(INSTALLED_APPS=['django.contrib.contenttypes', 'escrowmq.django']); django.setup()"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    last = ran.stderr.splitlines()[-1]
    assert last.startswith("escrowmq.errors.Misuse: MISSING_PACKAGE: escrowmq.django needs sqlalchemy")
    assert 'pip install "escrowmq[django]"' in ran.stderr
