"""The methods of :class:`~escrowmq.client.admin.Admin`, to await; each runs on a thread."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from escrowmq.client.admin import Admin

P = ParamSpec("P")
T = TypeVar("T")


def _make_awaitable(
    method: Callable[Concatenate[Admin, P], T],
) -> Callable[Concatenate[AsyncAdmin, P], Coroutine[Any, Any, T]]:
    """Return a coroutine function that runs a method of :class:`Admin` on a thread."""

    @functools.wraps(method)
    async def call(self: AsyncAdmin, /, *args: P.args, **given: P.kwargs) -> T:
        return await asyncio.to_thread(method, self._admin, *args, **given)

    return call


class AsyncAdmin:
    """Operators' queries and actions for asyncio: see :class:`~escrowmq.client.admin.Admin`."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    topics = _make_awaitable(Admin.topics)
    create_topic = _make_awaitable(Admin.create_topic)
    alter_topic = _make_awaitable(Admin.alter_topic)
    delete_topic = _make_awaitable(Admin.delete_topic)
    offsets = _make_awaitable(Admin.offsets)
    groups = _make_awaitable(Admin.groups)
    alter_group = _make_awaitable(Admin.alter_group)
    reset_group = _make_awaitable(Admin.reset_group)
    pause_group = _make_awaitable(Admin.pause_group)
    resume_group = _make_awaitable(Admin.resume_group)
    limit_group = _make_awaitable(Admin.limit_group)
    delete_group = _make_awaitable(Admin.delete_group)
    members = _make_awaitable(Admin.members)
    fence = _make_awaitable(Admin.fence)
    producers = _make_awaitable(Admin.producers)
    alter_producers = _make_awaitable(Admin.alter_producers)
    writers = _make_awaitable(Admin.writers)
    forget_writer = _make_awaitable(Admin.forget_writer)
    transactions = _make_awaitable(Admin.transactions)
    transactions_summary = _make_awaitable(Admin.transactions_summary)
    transaction = _make_awaitable(Admin.transaction)
    commit = _make_awaitable(Admin.commit)
    rollback = _make_awaitable(Admin.rollback)
    recheck = _make_awaitable(Admin.recheck)
    dead_letters = _make_awaitable(Admin.dead_letters)
    dead_letters_at = _make_awaitable(Admin.dead_letters_at)
    dead_letter_attempts = _make_awaitable(Admin.dead_letter_attempts)
    dead_letters_summary = _make_awaitable(Admin.dead_letters_summary)
    retry_dead_letters = _make_awaitable(Admin.retry_dead_letters)
    discard_dead_letters = _make_awaitable(Admin.discard_dead_letters)
    edit_dead_letter = _make_awaitable(Admin.edit_dead_letter)
    settle_dead_letters = _make_awaitable(Admin.settle_dead_letters)
    acts = _make_awaitable(Admin.acts)
    verify_acts = _make_awaitable(Admin.verify_acts)
    lookup = _make_awaitable(Admin.lookup)
    read = _make_awaitable(Admin.read)
    health = _make_awaitable(Admin.health)
    stats = _make_awaitable(Admin.stats)
    hello = _make_awaitable(Admin.hello)
    step_down = _make_awaitable(Admin.step_down)
    standing = _make_awaitable(Admin.standing)
    message_standing = _make_awaitable(Admin.message_standing)
    whoami = _make_awaitable(Admin.whoami)
    denials = _make_awaitable(Admin.denials)
    reload_rights = _make_awaitable(Admin.reload_rights)
