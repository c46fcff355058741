"""``manage.py escrowmq_relay`` and ``escrowmq_work``: as processes that are asked to stop, and their errors."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import transaction
from django.test import override_settings
from till import tasks

import escrowmq as mq
from escrowmq import django as escrow
from escrowmq.django.models import OutboxMessage, TaskRecord
from forked import Forked

MANAGE = Path(__file__).parent / "manage.py"


@contextmanager
def command(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A command that has told that it runs; it is killed at the end if it still does."""
    with Forked([sys.executable, MANAGE, *words], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "Ctrl-C stops it" in process.stderr.readline()
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == 0, errors


def test_a_worker_with_a_relay_is_a_site_in_one_process(
    site: str, tmp_path: Path, eventually: Callable[..., Any]
) -> None:
    """It finishes its task when it is asked to stop, and the next one goes on with the rest."""
    with transaction.atomic():
        results = [tasks.note.enqueue(number) for number in range(5)]
    words = ("escrowmq_work", "--relay", "--url", f"file:{tmp_path / 'data'}", "--queue", "default")
    with command(site, *words) as process:
        eventually(lambda: TaskRecord.objects.filter(status="SUCCESSFUL").count() == 5)
        stop(process)
    more = tasks.note.enqueue(6)
    with command(site, *words, "--threads", "2") as process:
        eventually(lambda: tasks.note.get_result(more.id).is_finished)
        stop(process)
    assert {tasks.note.get_result(one.id).attempts for one in results} == {1}
    assert not OutboxMessage.objects.exists()


def test_a_relay_runs_until_it_is_asked_to_stop(site: str, tmp_path: Path, eventually: Callable[..., Any]) -> None:
    url = f"file:{tmp_path / 'data'}"
    with command(site, "escrowmq_relay", "--to", url) as process:
        with transaction.atomic():
            identity = escrow.send_tx("orders", b"x")
        eventually(lambda: not OutboxMessage.objects.exists())
        stop(process)
    with mq.connect(url) as bus, bus.consumer("cart", ["orders"]) as consumer:
        assert [message.message_id for message in consumer.receive(1, wait=10)] == [identity]


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
