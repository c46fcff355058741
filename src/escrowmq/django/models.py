"""Models: rows of the outbox and of the record of operator actions, and the tasks.

The columns of the first two are those of :mod:`escrowmq.outbox.tables`, whose steps create the tables.
"""

from __future__ import annotations

from django.db import models

from escrowmq.outbox.tables import State


class OutboxMessage(models.Model):
    """A row of ``trans_message``. Write it with :func:`escrowmq.django.send_tx` only."""

    seq = models.BigAutoField(primary_key=True)
    message_id = models.BinaryField(db_column="id")
    lane = models.SmallIntegerField()
    state = models.SmallIntegerField(choices=[(state.value, state.name.lower()) for state in State])
    topic = models.CharField(max_length=127)
    key = models.TextField(null=True)
    tag = models.TextField(null=True)
    properties = models.TextField(null=True)
    body = models.BinaryField()
    delay_us = models.BigIntegerField()
    attempts = models.IntegerField()
    due_us = models.BigIntegerField()
    created_us = models.BigIntegerField()
    sent_us = models.BigIntegerField(null=True)
    done_us = models.BigIntegerField(null=True)
    error = models.TextField(null=True)

    class Meta:
        db_table = "trans_message"
        verbose_name = "outbox message"
        default_permissions = ("view",)
        permissions = (("operate_outboxmessage", "Can retry, discard and settle outbox messages"),)

    def __str__(self) -> str:
        return bytes(self.message_id).hex()


class OperatorAction(models.Model):
    """A row of ``trans_act``: an operator action, chained to the one before by a hash."""

    number = models.BigIntegerField(primary_key=True)
    record = models.TextField()

    class Meta:
        db_table = "trans_act"
        managed = False  # a test's flush must not cut the chain
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"action {self.number}"


class TaskRecord(models.Model):
    """A task of the backend :class:`escrowmq.django.tasks.EscrowBackend`, and its result.

    Arguments, result and errors are JSON texts: every database stores them alike, any character included.
    """

    class Status(models.TextChoices):
        """As ``TaskResultStatus``."""

        READY = "READY"
        RUNNING = "RUNNING"
        FAILED = "FAILED"
        SUCCESSFUL = "SUCCESSFUL"

    id = models.CharField(primary_key=True, max_length=32)
    backend = models.CharField(max_length=64)
    task_path = models.CharField(max_length=500)
    queue_name = models.CharField(max_length=127)
    run_after = models.DateTimeField(null=True)
    status = models.CharField(max_length=10, choices=Status.choices, default=Status.READY)
    enqueued_at = models.DateTimeField()
    started_at = models.DateTimeField(null=True)
    last_attempted_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)
    arguments = models.TextField()
    return_value = models.TextField(null=True)
    errors = models.TextField(default="[]")
    worker_ids = models.TextField(default="[]")

    class Meta:
        db_table = "escrow_task"
        verbose_name = "task"
        default_permissions = ("view",)
        indexes = (models.Index(fields=["status", "finished_at"], name="escrow_task_by_status"),)

    def __str__(self) -> str:
        return f"{self.task_path} {self.id}"
