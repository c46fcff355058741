"""A consumer group, and the named members of one that holds what is in doubt."""

from __future__ import annotations

from dataclasses import dataclass, field

from escrowmq.ledger.commands import Subscription
from escrowmq.ledger.groups.cursors import Cursor, Lease


@dataclass(slots=True, eq=False)
class Member:
    """A named member of one group."""

    id: int
    name: str
    epoch: int
    process: int
    joined_us: int
    fenced: bool = False
    doubted: dict[int, Lease] = field(default_factory=dict)
    """Leases with something in doubt, by id."""

    def note(self, lease: Lease) -> None:
        """Keep ``doubted`` true after a change of ``lease``."""
        if lease.pending and lease.pending_from(lease.doubt):
            self.doubted[lease.id] = lease
        else:
            self.doubted.pop(lease.id, None)


@dataclass(slots=True, eq=False)
class Group:
    """One consumer group."""

    ordinal: int
    name: str
    subscription: Subscription
    cursors: dict[int, Cursor] = field(default_factory=dict)
    members: dict[int, Member] = field(default_factory=dict)
    """The named members of a group that holds what is in doubt."""
    leases: int = 0
    """How many of its leases live."""
    served: int = -1
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
