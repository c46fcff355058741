"""SIGKILL at every step: a task runs and a message is sent if and only if the database committed, by id."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import placing_child
from till.models import Effect, Order
from till.tasks import note

import escrowmq as mq
import forked
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
    assert len(repeated) <= 1, "only the task that was killed between its effect and its result ran again"
    records = TaskRecord.objects.all()
    assert sorted((row.task_path, json.loads(row.arguments)["args"][0]) for row in records) == sorted(
        (path, number) for path in ("till.tasks.note", "till.tasks.note_once") for number in committed
    )
    assert {note.get_result(row.id).attempts for row in records if row.task_path == note.module_path} <= {1, 2}
    with mq.connect(url) as bus, bus.consumer("cart", ["orders"]) as consumer:
        keys = [int(message.key or 0) for message in consumer.messages(idle_timeout=0.5)]
    assert sorted(keys) == sorted(committed), "each message once, and none of a block that did not commit"
