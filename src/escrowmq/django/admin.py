"""Admin pages: messages of the outbox with operations on them, the record of those operations, and tasks.

The operations are those of :mod:`escrowmq.outbox.attention`, recorded under the user of the admin. They need the
permission ``escrowmq.operate_outboxmessage``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ActionForm
from django.db import transaction
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse

from escrowmq.acts.chain import parse
from escrowmq.acts.telling import describe_outcome
from escrowmq.django.database import engine_of
from escrowmq.django.models import OperatorAction, OutboxMessage, TaskRecord
from escrowmq.errors import EscrowError
from escrowmq.outbox import attention
from escrowmq.outbox.acts import Done

BODY_CHARACTERS = 2_000


def _time(name: str) -> Any:
    """Return a column of the page: the time of ``name``, which holds microseconds."""

    def show(_: Any, row: Any) -> datetime | None:
        return _to_time(getattr(row, name))

    return admin.display(description=name.removesuffix("_us"), ordering=name)(show)


def _recorded(name: str) -> Any:
    """Return a column of the page: a field of the record, None if it is unreadable."""

    def show(_: Any, row: OperatorAction) -> Any:
        try:
            record = parse(row.record.encode())[0]
        except ValueError:
            return None
        found = getattr(record, name)
        if name == "at_us":
            return _to_time(found)
        return describe_outcome({"ended": found}, str) if name == "ended" else found

    return admin.display(description=TITLES.get(name, name))(show)


TITLES = {"at_us": "time", "ended": "results"}


def _to_time(moment_us: int | None) -> datetime | None:
    return datetime.fromtimestamp(moment_us / 1e6, UTC) if moment_us else None


class WhyForm(ActionForm):
    """The choice of an operation, and its reason."""

    why = forms.CharField(required=False, max_length=500, label="Reason")


class ReadOnlyAdmin(admin.ModelAdmin):
    """Pages that change nothing by a form."""

    def has_add_permission(self, *_: Any) -> bool:
        """Return False."""
        return False

    def has_change_permission(self, *_: Any, **__: Any) -> bool:
        """Return False."""
        return False

    def has_delete_permission(self, *_: Any, **__: Any) -> bool:
        """Return False."""
        return False


@admin.register(OutboxMessage)
class OutboxMessageAdmin(ReadOnlyAdmin):
    """Messages of the outbox: list, retry, discard, settle."""

    list_display = ("seq", "message", "state", "topic", "key", "attempts", "created", "problem")
    list_filter = ("state", "topic")
    search_fields = ("key", "error")
    ordering = ("seq",)
    show_full_result_count = False
    actions = ("retry", "discard", "settle")
    action_form = WhyForm
    fields = (
        "seq", "message", "state", "topic", "key", "tag", "properties", "body_text", "attempts", "created", "due",
        "sent", "done", "error",
    )  # fmt: skip
    created, due, sent, done = map(_time, ("created_us", "due_us", "sent_us", "done_us"))

    @transaction.non_atomic_requests
    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """List messages. Never atomic: an operation has a transaction of its own, which must not wait for this one."""
        return super().changelist_view(request, extra_context)

    def get_queryset(self, request: HttpRequest) -> QuerySet[OutboxMessage]:
        """Read the list without bodies."""
        found = super().get_queryset(request)
        match = request.resolver_match
        return found.defer("body") if match and match.url_name.endswith("_changelist") else found

    def has_operate_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may run operations."""
        return bool(request.user.has_perm("escrowmq.operate_outboxmessage"))

    @admin.action(permissions=["operate"], description="Send again now (retry)")
    def retry(self, request: HttpRequest, chosen: QuerySet[OutboxMessage]) -> None:
        """Send waiting, retrying and discarded messages now."""
        self._operate(attention.retry, request, chosen)

    @admin.action(permissions=["operate"], description="Never send (discard)")
    def discard(self, request: HttpRequest, chosen: QuerySet[OutboxMessage]) -> None:
        """Never send these messages; retry restores them."""
        self._operate(attention.discard, request, chosen)

    @admin.action(permissions=["operate"], description="Mark as done without sending (settle)")
    def settle(self, request: HttpRequest, chosen: QuerySet[OutboxMessage]) -> None:
        """Mark messages as done, because they arrived or need no sending."""
        self._operate(attention.settle, request, chosen)

    def _operate(self, act: Callable[..., list[Done]], request: HttpRequest, chosen: QuerySet[OutboxMessage]) -> None:
        ids = [bytes(identity) for identity in chosen.values_list("message_id", flat=True)]
        by, why = request.user.get_username(), request.POST.get("why") or None
        try:
            done = act(engine_of(chosen.db), ids, by=by, why=why)
        except EscrowError as problem:
            self.message_user(request, f"{problem}", messages.ERROR)
            return
        for code, count in Counter(one.code.name for one in done).items():
            level = messages.SUCCESS if code == "OK" else messages.WARNING
            self.message_user(request, f"{act.__name__}: {count:,} {code}", level)

    @admin.display(description="message id")
    def message(self, row: OutboxMessage) -> str:
        """Return the id as hexadecimal digits."""
        return bytes(row.message_id).hex()

    @admin.display(description="body")
    def body_text(self, row: OutboxMessage) -> str:
        """Return the beginning of the body as text."""
        body = bytes(row.body)
        text = body[:BODY_CHARACTERS].decode(errors="backslashreplace")
        return text if len(body) <= BODY_CHARACTERS else f"{text}... ({len(body):,} bytes)"

    @admin.display(description="error")
    def problem(self, row: OutboxMessage) -> str | None:
        """Return the first line of the error."""
        return (row.error or "").partition("\n")[0] or None


@admin.register(OperatorAction)
class OperatorActionAdmin(ReadOnlyAdmin):
    """The record of operator actions. ``escrowmq acts verify`` checks its chain of hashes."""

    list_display = ("number", "time", "act", "by", "why", "results")
    ordering = ("-number",)
    show_full_result_count = False
    fields = ("number", "time", "act", "by", "why", "results", "record")
    time, act, by, why, results = map(_recorded, ("at_us", "act", "by", "why", "ended"))


@admin.register(TaskRecord)
class TaskRecordAdmin(ReadOnlyAdmin):
    """Tasks and their results."""

    list_display = ("id", "task_path", "queue_name", "status", "enqueued_at", "run_after", "started_at", "finished_at")
    list_filter = ("status", "queue_name")
    search_fields = ("id", "task_path")
    ordering = ("-enqueued_at",)
    show_full_result_count = False
