"""The worker of :class:`escrowmq.django.tasks.EscrowBackend`.

Theory of operation.

1. Each thread receives one message at a time, so no task waits behind a long one with its lease running.
2. A task begins with a change of its record from what was read (READY, or RUNNING of a worker that is gone) to RUNNING
   with one worker more. Its result is stored only if the record is still in that state: of two attempts that overlap,
   because one lost its lease, only the later one stores a result.
3. One thread extends the leases of all running tasks, three times per lease.
4. The message is acknowledged after the result is committed. A repeat finds a finished record, and is acknowledged.
5. A database that is away is retried with the lease kept. Unfinished tasks of a killed worker come again after their
   lease, ``max_attempts`` times; then the task is FAILED.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable
from datetime import datetime
from traceback import format_exception
from typing import Any, TypeVar

from django.db import DatabaseError, InterfaceError, OperationalError, close_old_connections, connections
from django.utils import timezone

from escrowmq.client.bus import Bus
from escrowmq.client.consuming.consumer import Consumer
from escrowmq.client.consuming.received import Received
from escrowmq.django.models import TaskRecord
from escrowmq.django.task_api import TaskContext, TaskResult, normalize_json, task_finished, task_started
from escrowmq.django.tasks import AttemptsExhausted, EscrowBackend, result_of, task_of
from escrowmq.errors import EscrowError, Misuse, Rejected
from escrowmq.platform.backoff import Backoff
from escrowmq.platform.failpoints import reach

_log = logging.getLogger(__name__)
RECEIVE_SECONDS = 0.5
"""Longest wait (s) for a message before a thread checks whether to stop."""
FIRST_PAUSE, LAST_PAUSE = 0.2, 10.0
"""Back-off (s) while the broker or the database is away."""
MAX_RESULT = 1 << 20
"""Longest JSON text of a result; a traceback is cut to the last sixteenth of it."""
AWAY = (OperationalError, InterfaceError)
"""The errors of a database that is away or locked."""
Status = TaskRecord.Status
T = TypeVar("T")


class Worker:
    """Runs the tasks of some queues until stopped. ``threads`` per queue; the caller closes the bus.

    ``wait`` sleeps for some seconds, and returns whether the worker has ended: a test exchanges it.
    """

    def __init__(
        self,
        bus: Bus,
        backend: EscrowBackend,
        queues: Iterable[str],
        *,
        threads: int = 1,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self._backend, self._using = backend, backend.given.database
        self._name = f"{socket.gethostname()}-{os.getpid()}"
        self._stopping, self._ended = threading.Event(), threading.Event()
        self._wait = wait or self._ended.wait
        self._backoff = Backoff(FIRST_PAUSE, LAST_PAUSE)
        self._running: set[Received] = set()
        self._lock = threading.Lock()
        self._problem: BaseException | None = None
        lease = backend.given.lease
        self._consumers = [bus.consumer(topic, [topic], lease=lease) for topic in map(backend.topic_of, queues)]
        self._threads = [
            threading.Thread(target=self._work, args=(consumer,), name=f"escrowmq-{consumer.group}-{number}")
            for consumer in self._consumers
            for number in range(threads)
        ]
        self._keeper = threading.Thread(target=self._keep_leases, name="escrowmq-leases", daemon=True)

    def ask_to_stop(self) -> None:
        """Begin no further task; returns at once (for signal handlers)."""
        self._stopping.set()

    def run(self) -> None:
        """Run until :meth:`ask_to_stop` is called, and running tasks have ended.

        Raises the error of a failed thread, and at once the error of a database that is away or has no tables.
        """
        try:
            TaskRecord.objects.using(self._using).exists()
        finally:
            connections[self._using].close()  # this thread only waits
        for thread in (self._keeper, *self._threads):
            thread.start()
        for thread in self._threads:
            while thread.is_alive():
                thread.join(0.2)  # with a timeout, because signals are handled when this thread wakes
        self._ended.set()
        for consumer in self._consumers:
            consumer.close()
        if self._problem is not None:
            raise self._problem

    # Threads

    def _work(self, consumer: Consumer) -> None:
        try:
            while not self._stopping.is_set():
                for message in self._receive(consumer):
                    self._handle(message)
        except BaseException as problem:
            _log.critical("the worker stops: %r", problem, exc_info=True)
            self._problem = self._problem or problem
            self._stopping.set()
        finally:
            connections.close_all()

    def _receive(self, consumer: Consumer) -> list[Received]:
        """Return one message, or none."""
        try:
            found = consumer.receive(1, wait=RECEIVE_SECONDS)
        except (Misuse, Rejected):
            raise
        except EscrowError as problem:
            level = logging.DEBUG if self._backoff.failing else logging.WARNING
            _log.log(level, "the broker is away: %s", problem)
            self._stopping.wait(self._backoff.failed())
            return []
        self._backoff.worked()
        kept = 0 if self._stopping.is_set() else 1
        for other in found[kept:]:  # several brokers answered, or the worker is to stop
            other.release()
        return found[:kept]

    def _keep_leases(self) -> None:
        lease = self._backend.given.lease
        while not self._wait(lease / 3):
            with self._lock:
                running = list(self._running)
            for message in running:
                try:
                    message.extend(lease)
                except EscrowError as problem:
                    _log.warning("the lease of task %s was not extended: %s", message.message_id.hex(), problem)

    # One task

    def _handle(self, message: Received) -> None:
        with self._lock:
            self._running.add(message)
        try:
            self._run(message)
        except AWAY as problem:  # and the worker stops
            _log.warning("task %s is given up, and comes again: %s", message.message_id.hex(), problem)
        except (DatabaseError, Misuse):  # such as missing tables: no message causes it
            raise
        except Exception as problem:
            _log.exception("task %s cannot be run here", message.message_id.hex())
            message.nack(cause=repr(problem))
        finally:
            with self._lock:
                self._running.discard(message)
            close_old_connections()

    def _run(self, message: Received) -> None:
        identity = message.message_id.hex()
        record = self._patiently(lambda: TaskRecord.objects.using(self._using).filter(pk=identity).first())
        if record is None:
            return message.nack(cause="the database has no task of this id")
        task = task_of(record)  # without it: another version of the program may have it
        reach("task.received")
        if self._patiently(lambda: self._begin(record)):
            reach("task.begun")
            self._call(record, result_of(record, task))
        message.ack()
        reach("task.acknowledged")

    def _begin(self, record: TaskRecord) -> bool:
        """Mark a task as running here. Returns False if it has a result, or gets one because its attempts are used
        up."""
        while record.status in (Status.READY, Status.RUNNING):
            workers, now = json.loads(record.worker_ids), timezone.now()
            if len(workers) >= self._backend.given.max_attempts:
                gone = AttemptsExhausted(f"{len(workers)} workers ended without a result: {', '.join(workers)}")
                if self._finish(record, gone):
                    return False
            elif self._change(
                record,
                status=Status.RUNNING,
                worker_ids=json.dumps([*workers, f"{self._name}-{threading.get_native_id()}"]),
                started_at=record.started_at or now,
                last_attempted_at=now,
            ):
                return True
            record.refresh_from_db(using=self._using)
        return False

    def _call(self, record: TaskRecord, result: TaskResult) -> None:
        """Run the task's function, and store its result."""
        task = result.task
        task_started.send_robust(type(self._backend), task_result=result)
        context = [TaskContext(task_result=result)] if task.takes_context else []
        try:
            value = json.dumps(normalize_json(task.call(*context, *result.args, **result.kwargs)))
            if len(value) > MAX_RESULT:
                raise ValueError(f"the result has {len(value):,} characters, more than {MAX_RESULT:,}")
        except BaseException as problem:
            self._store(record, problem)  # here, so that a log line about the result has the traceback
        else:
            self._store(record, None, value)

    def _store(self, record: TaskRecord, problem: BaseException | None, value: str | None = None) -> None:
        """Store a result, as JSON; retry while the database is away."""
        reach("task.ran")
        self._patiently(lambda: self._finish(record, problem, value))
        reach("task.stored")

    def _finish(self, record: TaskRecord, problem: BaseException | None, value: str | None = None) -> bool:
        """Store a result, as JSON. Returns False if the record was changed meanwhile."""
        changes: dict[str, Any] = {"finished_at": timezone.now(), "status": Status.SUCCESSFUL}
        if problem is None:
            changes["return_value"] = value
        else:
            kind = type(problem)
            text = "".join(format_exception(problem))[-MAX_RESULT // 16 :]
            error = {"exception_class_path": f"{kind.__module__}.{kind.__qualname__}", "traceback": text}
            changes |= {"status": Status.FAILED, "errors": json.dumps([*json.loads(record.errors), error])}
        if not self._change(record, **changes):
            _log.warning("task %s was taken over by another worker; its result here is dropped", record.pk)
            return False
        task_finished.send_robust(type(self._backend), task_result=result_of(record, task_of(record)))
        return True

    def _change(self, record: TaskRecord, **changes: str | datetime | None) -> bool:
        """Change a record if it is as it was read. Returns whether it was."""
        as_read = {"pk": record.pk, "status": record.status, "worker_ids": record.worker_ids}
        if not TaskRecord.objects.using(self._using).filter(**as_read).update(**changes):
            return False
        for name, value in changes.items():
            setattr(record, name, value)
        return True

    def _patiently(self, use_database: Callable[[], T]) -> T:
        """Use the database; retry while it is away. Raises its error when the worker is to stop."""
        backoff = Backoff(FIRST_PAUSE, LAST_PAUSE)
        while True:
            try:
                return use_database()
            except AWAY as problem:
                close_old_connections()
                _log.log(logging.DEBUG if backoff.failing else logging.WARNING, "the database is away: %s", problem)
                if self._stopping.wait(backoff.failed()):
                    raise
