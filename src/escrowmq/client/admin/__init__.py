"""The admin API: topics, groups, transactions, look-ups and dead letters. With several brokers each call goes to all of
them; each answer names its ``broker``, and ``missing`` of a listing names those that are away.

Entries of listings are dicts: the fields of :mod:`escrowmq.wire.actions` (``docs/reference/protocol.md``) and the
broker's address."""

from __future__ import annotations

from escrowmq.client.admin.brokers import BrokersAdmin
from escrowmq.client.admin.dead_letters import DeadLettersAdmin
from escrowmq.client.admin.groups import GroupsAdmin
from escrowmq.client.admin.rights import RightsAdmin
from escrowmq.client.admin.topics import TopicsAdmin
from escrowmq.client.admin.transactions import TransactionsAdmin

__all__ = ["Admin"]


class Admin(TopicsAdmin, GroupsAdmin, TransactionsAdmin, DeadLettersAdmin, BrokersAdmin, RightsAdmin):
    """Topics, groups, transactions, look-ups, dead letters, and operator actions. ``timeout`` is seconds per call.

    A change of existing data is recorded by the broker before it is done, with the user and the host as the operating
    system names them, and ``why``; a change that cannot be recorded is not done. See :meth:`acts`.
    """
