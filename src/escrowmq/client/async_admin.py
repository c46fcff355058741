"""The methods of :class:`~escrowmq.client.admin.Admin`, to await; each runs on a thread."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from escrowmq.client.admin import Admin

P = ParamSpec("P")
T = TypeVar("T")


def _awaited(
    method: Callable[Concatenate[Admin, P], T],
) -> Callable[Concatenate[AsyncAdmin, P], Coroutine[Any, Any, T]]:
    """Wrap a method so that it runs on a thread and can be awaited."""

    @functools.wraps(method)
    async def call(self: AsyncAdmin, /, *args: P.args, **given: P.kwargs) -> T:
        return await asyncio.to_thread(method, self._admin, *args, **given)

    return call


class AsyncAdmin:
    """What operators ask and do, to await: see :class:`~escrowmq.client.admin.Admin`."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    topics = _awaited(Admin.topics)
    create_topic = _awaited(Admin.create_topic)
    alter_topic = _awaited(Admin.alter_topic)
    delete_topic = _awaited(Admin.delete_topic)
    offsets = _awaited(Admin.offsets)
    groups = _awaited(Admin.groups)
    alter_group = _awaited(Admin.alter_group)
    reset_group = _awaited(Admin.reset_group)
    pause_group = _awaited(Admin.pause_group)
    resume_group = _awaited(Admin.resume_group)
    delete_group = _awaited(Admin.delete_group)
    members = _awaited(Admin.members)
    fence = _awaited(Admin.fence)
    producers = _awaited(Admin.producers)
    alter_producers = _awaited(Admin.alter_producers)
    writers = _awaited(Admin.writers)
    forget_writer = _awaited(Admin.forget_writer)
    transactions = _awaited(Admin.transactions)
    transactions_summary = _awaited(Admin.transactions_summary)
    transaction = _awaited(Admin.transaction)
    commit = _awaited(Admin.commit)
    rollback = _awaited(Admin.rollback)
    recheck = _awaited(Admin.recheck)
    dead_letters = _awaited(Admin.dead_letters)
    dead_letters_at = _awaited(Admin.dead_letters_at)
    dead_letter_attempts = _awaited(Admin.dead_letter_attempts)
    dead_letters_summary = _awaited(Admin.dead_letters_summary)
    retry_dead_letters = _awaited(Admin.retry_dead_letters)
    discard_dead_letters = _awaited(Admin.discard_dead_letters)
    edit_dead_letter = _awaited(Admin.edit_dead_letter)
    settle_dead_letters = _awaited(Admin.settle_dead_letters)
    acts = _awaited(Admin.acts)
    verify_acts = _awaited(Admin.verify_acts)
    lookup = _awaited(Admin.lookup)
    read = _awaited(Admin.read)
    health = _awaited(Admin.health)
    stats = _awaited(Admin.stats)
    hello = _awaited(Admin.hello)
    step_down = _awaited(Admin.step_down)
    standing = _awaited(Admin.standing)
    message_standing = _awaited(Admin.message_standing)
