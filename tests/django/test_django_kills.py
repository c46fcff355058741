"""SIGKILL at every step: a task runs and a message is sent if and only if the database committed, by id; SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import placing_child
import pytest
from django.db import transaction
from till_app import tasks
from till_app.models import Effect, Order
from till_app.tasks import note

import escrowmq as mq
import forked
from escrowmq import django as escrow
from escrowmq.django.models import OutboxMessage, TaskRecord

HERE = Path(__file__).parent
STEPS = (
    "relay.read:1",
    "relay.sent:1",
    "relay.marked:1",
    "task.received:3",
    "task.begun:3",
    "task.ran:3",
    "task.stored:3",
    "task.acknowledged:3",
)
"""Where the process of relay, broker and worker dies: a relay's batch may have all rows, a worker has one task at a
time."""
ONCE = {1}


@pytest.mark.invariant("I37", "I38")
def test_producer_relay_broker_and_worker_killed_at_every_step(
    site: str, tmp_path: Path, eventually: Callable[..., Any]
) -> None:
    ran = forked.run([sys.executable, HERE / "placing_child.py", site], cwd=HERE)
    assert ran.returncode == 0, ran.stderr
    forks = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [fork["killed"] for fork in forks] == [True] * len(placing_child.PLACES), (forks, ran.stderr)
    committed = {number for fork in forks for number in fork["committed"]}
    assert set(Order.objects.values_list("id", flat=True)) == committed
    url = f"file:{tmp_path / 'data'}"
    words = [sys.executable, HERE / "manage.py", site, "escrowmq_work", "--relay", "--url", url]
    for at, step in enumerate(STEPS):
        new = range(100 + 4 * at, 104 + 4 * at)
        for number in new:
            placing_child.place(number)
        committed |= set(new)
        killed = forked.run(words, cwd=HERE, env={**os.environ, "ESCROWMQ_FAILPOINT": step})
        assert killed.returncode == -9, (step, killed.stderr)
    with forked.Forked(words, cwd=HERE) as process:
        try:
            eventually(lambda: not TaskRecord.objects.filter(status__in=["READY", "RUNNING"]).exists(), timeout=120)
            eventually(lambda: not OutboxMessage.objects.exists(), timeout=120)
        finally:
            process.terminate()
        assert process.wait() == 0
    assert set(TaskRecord.objects.values_list("status", flat=True)) == {"SUCCESSFUL"}
    effects = Counter(Effect.objects.values_list("order", flat=True))
    assert {number for number in effects if number > 0} == committed
    assert {number for number in effects if number < 0} == {-number for number in committed}
    assert {count for number, count in effects.items() if number < 0} == ONCE, "claimed with its effect: exactly once"
    repeated = [number for number, count in effects.items() if number > 0 and count > 1]
    assert len(repeated) <= len(STEPS), "each kill ends at most one task between its effect and its result"
    records = TaskRecord.objects.all()
    assert sorted((row.task_path, json.loads(row.arguments)["args"][0]) for row in records) == sorted(
        (path, number) for path in ("till_app.tasks.note", "till_app.tasks.note_once") for number in committed
    )
    assert {note.get_result(row.id).attempts for row in records if row.task_path == note.module_path} <= {1, 2}
    with mq.connect(url) as bus, bus.consumer("cart", ["orders"]) as consumer:
        messages = islice(consumer.messages(idle_timeout=60.0), len(committed))
        keys = [int(message.key or 0) for message in messages]
        keys += [int(message.key or 0) for message in consumer.messages(idle_timeout=0.5)]
    assert sorted(keys) == sorted(committed), "each message once, and none of a block that did not commit"


# Stopped, not killed


MANAGE = Path(__file__).parent / "manage.py"


@contextmanager
def command(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A command that has told that it runs; it is killed at the end if it still does."""
    with forked.Forked([sys.executable, MANAGE, *words], stderr=subprocess.PIPE, text=True) as process:
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
        assert [message.message_id for message in consumer.receive(1, wait=60.0)] == [identity]
