"""A backend for Django's tasks: a task is a row of ``escrow_task`` and a message of the outbox, in one transaction.

``enqueue`` inside ``transaction.atomic`` joins it: the task runs if and only if the block commits. Elsewhere it has a
transaction of its own. The row is the deduplication record of the result: a message that is delivered again finds it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, transaction
from django.utils import timezone
from django.utils.module_loading import import_string

from escrowmq.django.task_api import (
    BaseTaskBackend,
    Task,
    TaskError,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
    normalize_json,
    task_enqueued,
)
from escrowmq.django.transactional import send_tx
from escrowmq.message.names import is_name
from escrowmq.platform.failpoints import reach

if TYPE_CHECKING:
    from escrowmq.django.models import TaskRecord


class AttemptsExhausted(Exception):
    """Every attempt of a task ended with its worker: killed, out of memory, or cut off for longer than the lease."""


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """``OPTIONS`` of the backend in ``settings.TASKS``."""

    database: str = DEFAULT_DB_ALIAS
    """The alias of the database with the tasks and the outbox."""
    prefix: str = "tasks"
    """The topic of a queue is ``PREFIX.QUEUE``; so is its consumer group."""
    lease: float = 60.0
    """A worker that is silent for this long (s) loses its task to another one. Running tasks keep their lease."""
    max_attempts: int = 5
    """A task fails if this many workers ended while they ran it. An exception of the task is not repeated."""

    def __post_init__(self) -> None:
        is_number = isinstance(self.lease, int | float) and not isinstance(self.lease, bool)
        if not is_number or not 1 <= self.lease < 1e6:
            raise ImproperlyConfigured(f"lease = {self.lease!r}: seconds, at least 1")
        if not isinstance(self.max_attempts, int) or not 1 <= self.max_attempts <= 15:
            raise ImproperlyConfigured(f"max_attempts = {self.max_attempts!r}: 1 to 15")


class EscrowBackend(BaseTaskBackend):
    """The backend ``escrowmq.django.tasks.EscrowBackend``. Its worker is ``manage.py escrowmq_work``."""

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = False

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        try:
            self.given = TaskOptions(**self.options)
        except TypeError as problem:
            raise ImproperlyConfigured(f"TASKS[{alias!r}]['OPTIONS']: {problem}") from None

    def topic_of(self, queue: str) -> str:
        """Return the topic, and consumer group, of a queue."""
        return f"{self.given.prefix}.{queue}"

    def enqueue(self, task: Task, args: Any, kwargs: Any) -> TaskResult:
        """Store a task and its message. Raises Rejected(BAD_DELAY) if ``run_after`` is beyond the broker's longest
        delay (40 days)."""
        from escrowmq.django.models import TaskRecord

        self.validate_task(task)
        now, using = timezone.now(), self.given.database
        given = normalize_json({"args": list(args), "kwargs": dict(kwargs)})
        body = json.dumps({"task": task.module_path}).encode()
        with transaction.atomic(using):
            message_id = send_tx(self.topic_of(task.queue_name), body, delay=_delay(task.run_after, now), using=using)
            reach("task.sent")
            record = TaskRecord(
                id=message_id.hex(),
                backend=self.alias,
                task_path=task.module_path,
                queue_name=task.queue_name,
                run_after=task.run_after,
                enqueued_at=now,
                arguments=json.dumps(given),
            )
            record.save(using=using, force_insert=True)
            reach("task.recorded")
        result = result_of(record, task)
        transaction.on_commit(partial(task_enqueued.send_robust, type(self), task_result=result), using)
        return result

    def get_result(self, result_id: str) -> TaskResult:
        """Return the task as it is stored now. Raises TaskResultDoesNotExist."""
        from escrowmq.django.models import TaskRecord

        try:
            record = TaskRecord.objects.using(self.given.database).get(pk=result_id, backend=self.alias)
        except TaskRecord.DoesNotExist:
            raise TaskResultDoesNotExist(result_id) from None
        return result_of(record, task_of(record))

    def check(self, **kwargs: Any) -> list[checks.CheckMessage]:
        """Check that the app is installed, and that the topics of the queues are valid."""
        from django.apps import apps

        found = list(super().check(**kwargs))
        if not apps.is_installed("escrowmq.django"):
            found.append(checks.Error("escrowmq.django is not in INSTALLED_APPS", id="escrowmq.E001"))
        if wrong := [queue for queue in sorted(self.queues) if not is_name(self.topic_of(queue))]:
            text = f"{self.topic_of(wrong[0])!r} is not a valid topic name"
            found.append(checks.Error(text, hint="change the queue's name, or OPTIONS['prefix']", id="escrowmq.E002"))
        return found


def task_of(record: TaskRecord) -> Task:
    """Return the task of a record, with its options. Raises ImportError if this version of the program has none."""
    task = import_string(record.task_path)
    if not isinstance(task, Task):
        raise ImportError(f"{record.task_path} is not a task")
    return task.using(queue_name=record.queue_name, backend=record.backend, run_after=record.run_after)


def result_of(record: TaskRecord, task: Task) -> TaskResult:
    """Convert a record to Django's result."""
    given = json.loads(record.arguments)
    result = TaskResult(
        task=task,
        id=record.id,
        status=TaskResultStatus(record.status),
        enqueued_at=record.enqueued_at,
        started_at=record.started_at,
        finished_at=record.finished_at,
        last_attempted_at=record.last_attempted_at,
        args=given["args"],
        kwargs=given["kwargs"],
        backend=record.backend,
        errors=[TaskError(**one) for one in json.loads(record.errors)],
        worker_ids=json.loads(record.worker_ids),
    )
    if record.return_value is not None:
        object.__setattr__(result, "_return_value", json.loads(record.return_value))
    return result


def _delay(run_after: datetime | None, now: datetime) -> float:
    return 0.0 if run_after is None else max((run_after - now).total_seconds(), 0.0)
