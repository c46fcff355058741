"""A worker keeps the lease of a running task, and stops gracefully."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import pytest
from django.db import DatabaseError, connection
from till_app import tasks

import escrowmq as mq
from escrowmq.broker import embedded
from escrowmq.django.models import TaskRecord
from escrowmq.django.task_api import task_backends
from escrowmq.django.working import Worker
from escrowmq.errors import EscrowError
from escrowmq.platform.clock import SystemClock

LEASE = 600.0
TOPIC = "tasks.slow"
BEFORE = SystemClock


class Clock(BEFORE):
    """The broker's clock, which a test moves on; and a sleep by that clock, which tells when it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._ahead_us = self._until_us = 0
        self._ended = False

    def now_us(self) -> int:
        return super().now_us() + self._ahead_us

    def sleep(self, seconds: float) -> bool:
        """Sleep until the test has moved the clock on by ``seconds``. Returns whether the test has ended."""
        with self._changed:
            self._until_us = self._ahead_us + round(seconds * 1e6)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ended or self._ahead_us >= self._until_us)
            return self._ended

    def pass_time(self, seconds: float) -> None:
        """Move on by ``seconds``, and wait until the sleeper sleeps again."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._until_us > self._ahead_us, 60)
            self._ahead_us += round(seconds * 1e6)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._until_us > self._ahead_us, 60)

    def leap(self, seconds: float) -> None:
        """Move on without a sleeper."""
        self._ahead_us += round(seconds * 1e6)

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """The clock of the broker that the fixture ``bus`` opens: ask for it first."""
    made = Clock()
    monkeypatch.setattr(embedded, "SystemClock", lambda: made)
    yield made
    made.end()


@pytest.mark.usefixtures("site")
def test_a_task_of_thirty_leases_runs_once(clock: Clock, bus: mq.Bus, working: Any) -> None:
    calls: list[str] = []
    taken: list[mq.Received] = []

    def last(context: Any, name: str) -> list[str]:
        calls.append(context.task_result.id)
        rival = bus.consumer(TOPIC, [TOPIC], lease=LEASE)
        for _ in range(30 * 3):
            clock.pass_time(LEASE / 3)
            taken.extend(rival.receive(1))
        rival.close()
        return [name]

    tasks.running.append(last)
    result = tasks.call.enqueue("long")
    with working(wait=clock.sleep, lease=LEASE):
        wait_until(lambda: TaskRecord.objects.get(pk=result.id).status == "SUCCESSFUL")
    result.refresh()
    assert (calls, taken, result.attempts) == ([result.id], [], 1)
    rival = bus.consumer(TOPIC, [TOPIC], lease=LEASE)
    clock.leap(10 * LEASE)
    assert rival.receive(1) == [], "it was acknowledged"


@pytest.mark.usefixtures("site")
def test_without_an_extension_another_worker_gets_it(clock: Clock, bus: mq.Bus, working: Any) -> None:
    """The same rival is given the message of a worker that is silent: the test above can fail."""
    taken: list[mq.Received] = []

    def last(*_: Any) -> list[str]:
        rival = bus.consumer(TOPIC, [TOPIC], lease=LEASE)
        for _ in range(4):
            clock.leap(LEASE / 3)
            taken.extend(rival.receive(1))
        if not taken:
            taken.extend(rival.receive(1, wait=60.0))
        rival.close()
        return []

    tasks.running.append(last)
    result = tasks.call.enqueue("long")
    with working(wait=clock.sleep, lease=LEASE):
        wait_until(lambda: TaskRecord.objects.get(pk=result.id).status == "SUCCESSFUL")
    assert len(taken) == 1


def wait_until(condition: Any) -> None:
    pause = threading.Event()
    while not condition():
        pause.wait(0.02)


@pytest.mark.usefixtures("site")
def test_a_stop_finishes_the_task_at_hand_and_begins_no_other(working: Any, eventually: Any) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hold(_: Any, name: str) -> list[str]:
        begun.set()
        assert go_on.wait(60)
        return [name]

    tasks.running.append(hold)
    first, second = tasks.call.enqueue("first"), tasks.call.enqueue("second")
    with working() as worker:
        assert begun.wait(60)
        worker.ask_to_stop()
        go_on.set()
    states = {one.id: one.status for one in TaskRecord.objects.all()}
    assert sorted(states.values()) == ["READY", "SUCCESSFUL"]
    with working():  # at once: the other one was not leased
        eventually(lambda: not TaskRecord.objects.exclude(status="SUCCESSFUL").exists())
    assert {one.attempts for one in map(tasks.call.get_result, (first.id, second.id))} == {1}


@pytest.mark.usefixtures("site")
def test_a_worker_without_its_table_does_not_start(bus: mq.Bus) -> None:
    with connection.schema_editor() as editor:
        editor.delete_model(TaskRecord)
    with pytest.raises(DatabaseError):
        Worker(bus, task_backends["default"], ["slow"]).run()


@pytest.mark.usefixtures("site")
def test_a_thread_that_fails_ends_the_worker(bus: mq.Bus, eventually: Any) -> None:
    """It does not look healthy and do nothing."""
    worker = Worker(bus, task_backends["default"], ["slow", "default"], threads=2)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(worker.run)
        eventually(lambda: sum(one.name.startswith("escrowmq-tasks") for one in threading.enumerate()) == 4)
        bus.close()
        with pytest.raises((EscrowError, CancelledError)):
            ended.result(60)
