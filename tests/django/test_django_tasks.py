"""The backend of Django's tasks and its worker."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, connections, transaction
from django.utils import timezone
from till_app import tasks
from till_app.models import Effect, Order

import escrowmq as mq
from escrowmq.django.models import OutboxMessage, TaskRecord
from escrowmq.django.task_api import TaskResultDoesNotExist, task_backends, task_finished, task_started
from escrowmq.django.tasks import AttemptsExhausted, EscrowBackend
from escrowmq.errors import Code, Rejected


def ids() -> tuple[set[str], set[str]]:
    """Ids of the stored tasks, and of the messages."""
    messages = {bytes(one).hex() for one in OutboxMessage.objects.values_list("message_id", flat=True)}
    return set(TaskRecord.objects.values_list("id", flat=True)), messages


@pytest.fixture
def finished(eventually: Callable[..., Any]) -> Callable[[Any], Any]:
    """Wait for a result."""

    def wait(result: Any) -> Any:
        def is_finished() -> bool:
            result.refresh()
            return bool(result.is_finished)

        eventually(is_finished)
        return result

    return wait


@pytest.mark.usefixtures("site")
def test_a_task_is_stored_if_and_only_if_the_block_commits() -> None:
    with transaction.atomic():
        Order.objects.create(id=1)
        kept = tasks.note.enqueue(1)
        with suppress(LookupError), transaction.atomic():
            tasks.note.enqueue(2)
            raise LookupError
    with suppress(LookupError), transaction.atomic():
        tasks.note.enqueue(3)
        raise LookupError
    alone = tasks.note.enqueue(4)  # a transaction of its own
    assert ids() == ({kept.id, alone.id}, {kept.id, alone.id})
    assert (kept.status, kept.args, kept.attempts) == ("READY", [1], 0)


@pytest.mark.usefixtures("site")
def test_tasks_run_and_their_results_are_stored(working: Any, finished: Any) -> None:
    seen: list[tuple[str, str]] = []
    begun = lambda task_result, **_: seen.append((task_result.id, task_result.status))  # noqa: E731
    task_started.connect(begun)
    task_finished.connect(begun)
    results = [tasks.note.enqueue(7), tasks.double.enqueue(21), tasks.fail.enqueue("no"), tasks.answer_object.enqueue()]
    with working():
        note, double, fail, wrong = map(finished, results)
    assert [one.status for one in results] == ["SUCCESSFUL", "SUCCESSFUL", "FAILED", "FAILED"]
    assert (note.return_value, double.return_value) == (7, 42)
    assert list(Effect.objects.values_list("order", flat=True)) == [7]
    assert fail.errors[0].exception_class is ValueError
    assert "ValueError: no" in fail.errors[0].traceback
    assert wrong.errors[0].exception_class is TypeError
    assert note.enqueued_at <= note.started_at <= note.finished_at
    assert [one.attempts for one in results] == [1, 1, 1, 1]
    assert sorted(seen) == sorted([(one.id, status) for one in results for status in ("RUNNING", one.status)])
    assert tasks.note.get_result(note.id) == note
    task_started.disconnect(begun)
    task_finished.disconnect(begun)


@pytest.mark.usefixtures("site")
def test_a_task_can_be_enqueued_by_a_coroutine(working: Any, finished: Any) -> None:
    def leave() -> None:  # the thread in which Django runs what blocks, and its connection, would outlive the test
        connections.close_all()
        del connections["default"]

    async def enqueue() -> Any:
        try:
            return await tasks.double.aenqueue(4)
        finally:
            await sync_to_async(leave)()

    result = asyncio.run(enqueue())
    with working():
        assert finished(result).return_value == 8


@pytest.mark.usefixtures("site")
def test_a_result_has_any_character(working: Any, finished: Any) -> None:
    text = "\0 ключ 😀 \ud800 %s"
    tasks.running.append(lambda context, name: [context.attempt, name])
    result = tasks.call.enqueue(text)
    with working():
        assert finished(result).return_value == [1, text]


@pytest.mark.usefixtures("site")
def test_run_after_is_a_delay(working: Any, finished: Any) -> None:
    moment = timezone.now() + timedelta(seconds=1)
    late = tasks.note.using(run_after=moment).enqueue(1)
    past = tasks.note.using(run_after=timezone.now() - timedelta(days=1)).enqueue(2)
    with suppress(LookupError), transaction.atomic():
        tasks.note.using(run_after=timezone.now() + timedelta(hours=1)).enqueue(3)
        delays = sorted(OutboxMessage.objects.values_list("delay_us", flat=True))
        raise LookupError
    assert (delays[0], delays[1] <= 1_000_000) == (0, True)
    assert 3000e6 < delays[2] <= 3600e6
    with working():
        assert finished(past).attempts == finished(late).attempts == 1
    assert late.started_at >= moment
    with pytest.raises(Rejected) as caught:
        tasks.note.using(run_after=timezone.now() + timedelta(days=50)).enqueue(3)
    assert caught.value.code is Code.BAD_DELAY
    assert ids() == ({late.id, past.id}, set())


@pytest.mark.usefixtures("site")
def test_what_cannot_be_stored_stores_nothing() -> None:
    with pytest.raises(TypeError):
        tasks.note.enqueue(object())
    with pytest.raises(Exception, match="priority"):
        tasks.note.using(priority=5).enqueue(1)
    with pytest.raises(Exception, match="Queue 'other'"):
        tasks.note.using(queue_name="other").enqueue(1)
    assert ids() == (set(), set())
    with pytest.raises(TaskResultDoesNotExist):
        tasks.note.get_result("0" * 32)


@pytest.mark.usefixtures("site")
def test_a_large_result_is_an_error(working: Any, finished: Any) -> None:
    tasks.running.append(lambda *_: ["x" * (1 << 20)])
    result = tasks.call.enqueue("large")
    with working():
        assert "more than 1,048,576" in finished(result).errors[0].traceback


@pytest.mark.usefixtures("site")
def test_a_task_whose_workers_were_killed_fails_in_the_end(working: Any, finished: Any) -> None:
    result = tasks.note.enqueue(1)
    TaskRecord.objects.update(status="RUNNING", worker_ids='["a", "b", "c"]')  # as three killed workers leave it
    with working(max_attempts=3):
        finished(result)
    assert (result.status, result.errors[0].exception_class) == ("FAILED", AttemptsExhausted)
    assert not Effect.objects.exists()
    again = tasks.note.enqueue(2)
    TaskRecord.objects.filter(pk=again.id).update(status="RUNNING", worker_ids='["a", "b"]')
    with working(max_attempts=3):
        assert (finished(again).status, again.attempts) == ("SUCCESSFUL", 3)


@pytest.mark.usefixtures("site")
def test_of_two_attempts_that_overlap_the_later_one_stores_its_result(working: Any, eventually: Any) -> None:
    """The first one lost its lease meanwhile: its result is dropped."""

    def lose(context: Any, name: str) -> list[str]:
        row = TaskRecord.objects.get(pk=context.task_result.id)
        TaskRecord.objects.filter(pk=row.pk).update(worker_ids=row.worker_ids[:-1] + ', "another"]')
        return [name]

    tasks.running.append(lose)
    result = tasks.call.enqueue("mine")
    with working():  # leaving waits for the task
        eventually(lambda: TaskRecord.objects.get(pk=result.id).worker_ids.endswith('"another"]'))
    result.refresh()
    assert (result.status, result.attempts) == ("RUNNING", 2)


@pytest.mark.usefixtures("site")
def test_a_message_without_its_task_is_kept(bus: mq.Bus, working: Any, finished: Any, eventually: Any) -> None:
    """Unknown ids and tasks of another version of the program are redelivered, and become dead letters; others run."""
    lost, unknown, fine = tasks.note.enqueue(1), tasks.note.enqueue(2), tasks.note.enqueue(3)
    TaskRecord.objects.filter(pk=lost.id).delete()
    TaskRecord.objects.filter(pk=unknown.id).update(task_path="till_app.tasks.gone")

    def causes() -> dict[str, str]:
        letters = bus.admin.dead_letters("tasks.default")
        return {str(letter["message_id"]): letter["cause"] for letter in letters}

    with working():
        finished(fine)
        found = eventually(lambda: len(causes()) == 2 and causes())
    assert "the database has no task of this id" in found[lost.id]
    assert "ImportError" in found[unknown.id]
    assert TaskRecord.objects.get(pk=unknown.id).status == "READY"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)  # one lock on the whole database
def test_a_database_that_is_away_is_waited_for(
    site: str, working: Any, finished: Any, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    locked, free = threading.Event(), threading.Event()

    def lock(*_: Any) -> list[int]:
        connection.close()
        connection.settings_dict["OPTIONS"]["timeout"] = 0  # of the next connection of this thread
        locked.set()
        assert free.wait(60)
        return [1]

    tasks.running.append(lock)
    result = tasks.call.enqueue("x")
    with working():
        assert locked.wait(60)
        other = sqlite3.connect(site.removeprefix("sqlite:///"), isolation_level=None, timeout=60)
        other.execute("BEGIN EXCLUSIVE")
        free.set()
        eventually(lambda: "the database is away" in caplog.text)
        other.execute("ROLLBACK")
        other.close()
        assert finished(result).return_value == [1]
    assert result.attempts == 1


def test_wrong_options_are_named() -> None:
    for options in ({"lease": 0}, {"leese": 1}, {"max_attempts": 99}, {"lease": True}):
        with pytest.raises(ImproperlyConfigured, match=next(iter(options))):
            EscrowBackend("default", {"OPTIONS": options})
    wrong = EscrowBackend("default", {"QUEUES": ["no good"]})
    assert [one.id for one in wrong.check()] == ["escrowmq.E002"]
    assert list(task_backends["default"].check()) == []
