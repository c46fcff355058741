"""A consumer group, its named members, and the leases of a shard."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from escrowmq.ledger.columns.schedule import NEVER_US
from escrowmq.ledger.commands import Subscription
from escrowmq.ledger.groups.cursors import ACKED, TAKEN, Cursor, Lease, State
from escrowmq.ledger.groups.limits import NO_LIMITS, Bucket
from escrowmq.model import Limits

ALL = ""  # of a paused group: all its topics. No topic has this name.
MAX_ENDED = 4096  # ended leases remembered for repeated acknowledgements


@dataclass(slots=True, eq=False)
class Member:
    """A named member of one group."""

    id: int
    name: str
    epoch: int
    process: int
    joined_us: int
    fenced: bool = False
    doubted: dict[int, Lease] = field(default_factory=dict)  # leases with something in doubt, by id

    def note(self, lease: Lease) -> None:
        """Add ``lease`` to ``doubted`` if pending messages of it are in doubt, else remove it, after it changed."""
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
    members: dict[int, Member] = field(default_factory=dict)  # the named members of a group that holds what is in doubt
    leases: int = 0  # how many of its leases live
    served: int = -1  # the queue id that was served last
    paused: dict[str, int] = field(default_factory=dict)  # paused topics, and since when; ``ALL``: the whole group
    limits: Limits = NO_LIMITS
    bucket: Bucket | None = None  # of a group with a rate

    def cursor(self, queue_id: int) -> Cursor:
        """Return the cursor of a queue; if the group has none, a new one at offset 0, which is not kept."""
        return self.cursors.get(queue_id) or Cursor(queue_id, 0)

    def meet(self, queue_id: int) -> Cursor:
        """Return the cursor of a queue; if the group has none, a new one at offset 0, which is kept."""
        return self.cursors.setdefault(queue_id, self.cursor(queue_id))

    def add_cursors(self, starts: Mapping[Any, int]) -> None:
        """Add a cursor for each queue that the group has none for. ``starts`` maps a queue's id (int or text) to the
        first offset to deliver."""
        for id, start in starts.items():
            self.cursors.setdefault(int(id), Cursor(int(id), start))

    def note(self, lease: Lease) -> None:
        """Update the named member that holds ``lease``, if any, after a change of the lease: :meth:`Member.note`."""
        if (member := self.members.get(lease.member)) is not None:
            member.note(lease)

    def is_paused(self, topic: str) -> bool:
        """Return whether a topic is paused, by its name or with the whole group."""
        return ALL in self.paused or topic in self.paused

    @property
    def flowing(self) -> tuple[str, ...]:
        """The subscribed topics that are not paused."""
        return tuple(topic for topic in self.subscription.topics if not self.is_paused(topic))

    @property
    def in_flight(self) -> int:
        """The number of leased messages."""
        return sum(cursor.counts[State.LEASED] for cursor in self.cursors.values())

    def room(self, now_us: int) -> int:
        """Return how many messages may be leased now by the rate and the limit in flight of the group; 0 or less: none.
        The limit per key is not included."""
        most = NEVER_US if self.bucket is None else self.bucket.room(now_us)
        return most if self.limits.in_flight is None else min(most, self.limits.in_flight - self.in_flight)

    def limit(self, limits: Limits, now_us: int) -> None:
        """Replace the limits of the group. A new rate starts with a full bucket; an unchanged one continues."""
        if limits.rate != self.limits.rate:
            self.bucket = None if limits.rate is None else Bucket(limits.rate, now_us)
        self.limits = limits

    def leases_of(self, member: int) -> list[Lease]:
        """Return the live leases of a member, oldest first."""
        found = [x for cursor in self.cursors.values() for x in cursor.leases.values() if x.member == member]
        return sorted(found, key=lambda lease: lease.id)


class Leases:
    """All leases of a shard by id, and by deadline.

    A lease lives while a message of it is pending. Ended ones with acks are remembered for a while (``MAX_ENDED``), so
    that an acknowledgement that is repeated after a lost response still gets OK.
    """

    __slots__ = ("_deadlines", "_first", "ended", "live")

    def __init__(self) -> None:
        self.live: dict[int, Lease] = {}
        self.ended: dict[int, Lease] = {}
        self._first = 0
        # Sorted, from _first on; an entry is stale if it is not the current deadline of a live lease.
        self._deadlines: list[tuple[int, int]] = []

    def add(self, lease: Lease) -> None:
        """Add a live lease."""
        self.live[lease.id] = lease
        lease.cursor.leases[lease.id] = lease
        self._note(lease)

    def extend(self, lease: Lease, deadline_us: int) -> None:
        """Give ``lease`` a new deadline."""
        if lease.deadline_us != deadline_us:
            lease.deadline_us = deadline_us
            self._note(lease)
            self._drop_stale()

    def end(self, lease: Lease) -> None:
        """Remove a live lease without pending messages; if it acked some, remember it for repeated acks."""
        del self.live[lease.id]
        del lease.cursor.leases[lease.id]
        if lease.mask is None or ACKED in lease.mask:
            self.remember(lease)
        self._drop_stale()

    def drop(self, lease: Lease) -> None:
        """Remove a live lease and take away the messages that are pending in it. It is not remembered: later
        acknowledgements of it are LEASE_LOST."""
        lease.take(lease.start, lease.end, TAKEN)
        del self.live[lease.id]
        del lease.cursor.leases[lease.id]
        self._drop_stale()

    def forget(self, cursors: Collection[Cursor]) -> None:
        """Forget ended leases of these cursors: their acknowledgements cannot be repeated."""
        gone = set(map(id, cursors))
        self.ended = {number: lease for number, lease in self.ended.items() if id(lease.cursor) not in gone}

    def remember(self, lease: Lease) -> None:
        """Keep an ended lease for repeated acknowledgements."""
        self.ended[lease.id] = lease
        if len(self.ended) > MAX_ENDED:
            del self.ended[next(iter(self.ended))]

    def find(self, id: int) -> Lease | None:
        """Return a lease by its id, live or remembered; None if there is none."""
        return self.live.get(id) or self.ended.get(id)

    @property
    def wake_us(self) -> int:
        """The earliest deadline of a live lease; ``NEVER_US``: none ends by time."""
        return self._deadlines[self._first][0] if self._first < len(self._deadlines) else NEVER_US

    def expired(self, now_us: int, limit: int) -> list[Lease]:
        """Return at most ``limit`` live leases whose deadline is not after ``now_us``, earliest first."""
        found: list[Lease] = []
        for index in range(self._first, len(self._deadlines)):
            if len(found) == limit or self._deadlines[index][0] > now_us:
                break
            if self._is_current(index):
                found.append(self.live[self._deadlines[index][1]])
        return found

    def _note(self, lease: Lease) -> None:
        if lease.deadline_us == NEVER_US:
            return
        entry = (lease.deadline_us, lease.id)
        place = bisect_left(self._deadlines, entry, lo=self._first)
        if place == len(self._deadlines) or self._deadlines[place] != entry:  # extended back to an earlier deadline
            self._deadlines.insert(place, entry)

    def _is_current(self, index: int) -> bool:
        deadline_us, id = self._deadlines[index]
        return id in self.live and self.live[id].deadline_us == deadline_us

    def _drop_stale(self) -> None:
        """Remove stale entries before the first current one, and all of them when they become many."""
        while self._first < len(self._deadlines) and not self._is_current(self._first):
            self._first += 1
        if len(self._deadlines) > 64 + 2 * len(self.live):
            self._deadlines = sorted(
                (lease.deadline_us, lease.id) for lease in self.live.values() if lease.deadline_us != NEVER_US
            )
            self._first = 0
