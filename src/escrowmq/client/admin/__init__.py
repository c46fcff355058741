"""The admin API: topics, groups, transactions, look-ups and dead letters. With several brokers everything is asked
of all of them; each answer names its ``broker``, and ``missing`` of a listing names those that are away.

Entries of listings are dicts: the fields of :mod:`escrowmq.wire.actions` (``docs/reference/protocol.md``) and the
broker's address.
"""

from __future__ import annotations

from escrowmq.client.admin.acts import ActsAdmin
from escrowmq.client.admin.brokers import BrokersAdmin
from escrowmq.client.admin.dead_letters import DeadLettersAdmin
from escrowmq.client.admin.groups import GroupsAdmin
from escrowmq.client.admin.messages import MessagesAdmin
from escrowmq.client.admin.producers import ProducersAdmin
from escrowmq.client.admin.rights import RightsAdmin
from escrowmq.client.admin.standing import StandingAdmin
from escrowmq.client.admin.topics import TopicsAdmin
from escrowmq.client.admin.transactions import TransactionsAdmin

__all__ = ["Admin"]


class Admin(
    TopicsAdmin,
    GroupsAdmin,
    ProducersAdmin,
    TransactionsAdmin,
    DeadLettersAdmin,
    ActsAdmin,
    MessagesAdmin,
    BrokersAdmin,
    StandingAdmin,
    RightsAdmin,
):
    """Topics, groups, transactions, look-ups, dead letters, and settling manually. ``timeout`` is seconds per call.

    What changes something that others have done is recorded by the broker before it is done, with the user and the host
    as the operating system names them, and ``why``; what cannot be recorded is not done. See :meth:`acts`.
    """
