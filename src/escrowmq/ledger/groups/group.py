"""A consumer group, and the named members of one that holds what is in doubt."""

from __future__ import annotations

from escrowmq.ledger.commands import Subscription
from escrowmq.ledger.groups.cursors import Cursor, Lease


class Member:
    """A named member of one group."""

    __slots__ = ("doubted", "epoch", "fenced", "id", "joined_us", "name", "process")

    def __init__(self, id: int, name: str, epoch: int, process: int, joined_us: int, *, fenced: bool = False) -> None:
        self.id = id
        self.name = name
        self.epoch = epoch
        self.process = process
        self.joined_us = joined_us
        self.fenced = fenced
        self.doubted: dict[int, Lease] = {}
        """Leases with something in doubt, by id."""

    def note(self, lease: Lease) -> None:
        """Keep ``doubted`` true after a change of ``lease``."""
        if lease.pending and lease.pending_from(lease.doubt):
            self.doubted[lease.id] = lease
        else:
            self.doubted.pop(lease.id, None)


class Group:
    """One consumer group."""

    __slots__ = ("cursors", "leases", "members", "name", "ordinal", "served", "subscription")

    def __init__(self, ordinal: int, name: str, subscription: Subscription) -> None:
        self.ordinal = ordinal
        self.name = name
        self.subscription = subscription
        self.cursors: dict[int, Cursor] = {}
        self.members: dict[int, Member] = {}
        """The named members of a group that holds what is in doubt."""
        self.leases = 0
        """How many of its leases live."""
        self.served = -1
        """The queue id that was served last."""

    def cursor(self, queue_id: int) -> Cursor:
        """The cursor of a queue, or a new one for a queue that the group has not met: it is not kept."""
        return self.cursors.get(queue_id) or Cursor(queue_id, 0)

    def meet(self, queue_id: int) -> Cursor:
        """The cursor of a queue, made and kept if the group has not met it."""
        if (cursor := self.cursors.get(queue_id)) is None:
            cursor = self.cursors[queue_id] = Cursor(queue_id, 0)
        return cursor

    def leases_of(self, member: int) -> list[Lease]:
        """The live leases of a member, oldest first."""
        found = [x for cursor in self.cursors.values() for x in cursor.leases.values() if x.member == member]
        return sorted(found, key=lambda lease: lease.id)
