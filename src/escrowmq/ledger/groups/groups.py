"""The state of all consumer groups of a shard, and how each event changes it.

Theory of operation:

1. A group has one :class:`~escrowmq.ledger.groups.cursors.Cursor` per queue. Any member may lease from any queue of the
   group's topics.
2. A lease is a row of a LEASED event: a range of a queue and an attempt. A range that starts at the cursor's ``next``
   is a first delivery of those of its offsets that the group's tags choose; one below takes what waits for a retry in
   it (in order: what is free of it, see ``order.py``). The lease's id is the log position of its row.
3. ACKED, RETRIED, DEAD, BURIED and EXTENDED name a lease and touch only what is pending in it. So a lease that ended
   can do nothing (I27), and an acknowledgement can be repeated.
4. What operators do to a whole group (reset, pause, delete) is decided in ``operating.py``. Numbers of groups are never
   used again; of a deleted one the name is known as long as the log may hold what it acknowledged.
5. What follows from the other commands is decided in ``consuming.py``; ``apply`` depends on the state and its arguments
   only.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
import pyarrow as pa

from escrowmq.errors import Code, error
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.columns.schedule import NEVER_US
from escrowmq.ledger.commands import Rules
from escrowmq.ledger.events import rows_of
from escrowmq.ledger.groups import members, order, receiving, reports, snapshots, subscriptions
from escrowmq.ledger.groups.cursors import ACKED, NOT_LEASED, PENDING, TAKEN, Cursor, Lease, State
from escrowmq.ledger.groups.dead import listing
from escrowmq.ledger.groups.dead.edited import Edit
from escrowmq.ledger.groups.dead.letters import Block, block_of
from escrowmq.ledger.groups.dead.listing import EVERY, Parts, Wanted
from escrowmq.ledger.groups.group import ALL, Group, Leases, Member
from escrowmq.ledger.groups.settling import RELEASED, UNSEEN
from escrowmq.ledger.queues.topics import Topics
from escrowmq.schemas import Kind

RETRY: Final = 0
"""An act of a DEAD_SETTLED row, as is ``DISCARD``."""
DISCARD: Final = 1

Rows: TypeAlias = Iterable[Sequence[Any]]
"""Rows of an event, values in the order of its schema."""


class Groups:
    """All consumer groups of a shard."""

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}
        """By their numbers, in the order in which they were made."""
        self.by_name: dict[str, Group] = {}
        self.next_ordinal = 0
        self.deleted: dict[int, tuple[str, int]] = {}
        """By number: the name, and the log position of the deletion."""
        self.leases = Leases()
        self.delivered = 0
        """Deliveries so far, repeats included."""
        self.acked = 0
        self._retry_times: list[int] = []  # a heap of times still to come; a hint for the caller's timer, not state

    # Applying

    def apply(
        self,
        kind: Kind,
        batch: pa.RecordBatch,
        time_us: int,
        topics: Topics,
        rules: Rules,
        rows: Rows | None = None,
    ) -> None:
        """Take in one event of ``KINDS``; ``rows``: the same as ``batch``, if they are at hand."""
        if (act := self._row_acts.get(kind)) is not None:
            act(self, rows_of(batch) if rows is None else rows, time_us, topics, rules)
        else:
            self._acts[kind](self, batch, time_us, topics, rules)

    def _apply_group(self, batch: pa.RecordBatch, _time_us: int, _topics: Topics, _rules: Rules) -> None:
        for row in batch.to_pylist():
            group = Group(self.next_ordinal, row["name"], subscriptions.load(row["subscription"]))
            group.cursors = {int(id): Cursor(int(id), start) for id, start in group.subscription.starts.items()}
            self.groups[group.ordinal] = self.by_name[group.name] = group
            self.next_ordinal += 1

    def _apply_altered(self, batch: pa.RecordBatch, _time_us: int, _topics: Topics, _rules: Rules) -> None:
        for ordinal, text in rows_of(batch):
            group = self.groups[ordinal]
            group.subscription = subscriptions.load(text)
            group.paused = {t: us for t, us in group.paused.items() if t in (ALL, *group.subscription.topics)}
            for id, start in group.subscription.starts.items():
                group.cursors.setdefault(int(id), Cursor(int(id), start))

    def _apply_reset(self, batch: pa.RecordBatch, _time_us: int, _topics: Topics, _rules: Rules) -> None:
        cursors = []
        for ordinal, queue_id, offset in rows_of(batch):
            group = self.groups[ordinal]
            cursor = group.meet(queue_id)
            self._end_leases(group, list(cursor.leases.values()))
            cursor.reset(offset)
            cursors.append(cursor)
        self.leases.forget(cursors)

    def _end_leases(self, group: Group, leases: Sequence[Lease]) -> None:
        """Whatever is settled of these from now on comes too late."""
        for lease in leases:
            self.leases.drop(lease)
            group.leases -= 1
            if (member := group.members.get(lease.member)) is not None:
                member.note(lease)

    def _apply_paused(self, batch: pa.RecordBatch, time_us: int, _topics: Topics, _rules: Rules) -> None:
        for ordinal, topic, paused in rows_of(batch):
            group = self.groups[ordinal]
            if paused:
                group.paused[topic] = time_us
            else:
                group.paused.pop(topic, None)

    def _apply_deleted(self, batch: pa.RecordBatch, _time_us: int, _topics: Topics, _rules: Rules) -> None:
        for position, ordinal in rows_of(batch):
            group = self.groups.pop(ordinal)
            del self.by_name[group.name]
            self._end_leases(group, [x for cursor in group.cursors.values() for x in cursor.leases.values()])
            self.leases.forget(list(group.cursors.values()))
            self.deleted[ordinal] = (group.name, position)

    def _apply_leased(self, rows: Rows, time_us: int, topics: Topics, _rules: Rules) -> None:
        for id, ordinal, queue_id, start, count, attempt, member, deadline_us in rows:
            group = self.groups[ordinal]
            group.served = queue_id
            cursor, end = group.meet(queue_id), start + count
            if start >= cursor.next:
                tags = receiving.tag_numbers(group.subscription.tags, topics)
                mask = _deliver_first(cursor, start, end, tags, topics)
            elif group.subscription.ordered:
                mask = _deliver_in_order(cursor, start, end, attempt, time_us)
            else:
                mask = _deliver_again(cursor, start, end)
            lease = Lease(id, ordinal, cursor, start, end, attempt, member, deadline_us, mask)
            if lease.pending:
                self.leases.add(lease)
                group.leases += 1
                self.delivered += lease.pending

    def _take(self, id: int, start: int, count: int, to: int, state: State) -> tuple[Lease, Int64s | None] | None:
        """Set the pending messages of a lease in a range to ``state``. Returns the lease and the offsets (None: all
        the range)."""
        lease = self.leases.live.get(id)
        if lease is None:
            return None
        offsets = lease.take(start, start + count, to)
        if offsets is None:
            lease.cursor.move_run(start, start + count, State.LEASED, state)
        else:
            lease.cursor.move(offsets, State.LEASED, state)
        self._on_change(lease)
        return lease, offsets

    def _on_change(self, lease: Lease) -> None:
        """Update a lease of which less is pending, or some is in doubt now."""
        group = self.groups[lease.group]
        if (member := group.members.get(lease.member)) is not None:
            member.note(lease)
        if not lease.pending:
            group.leases -= 1
            self.leases.end(lease)

    def _apply_joined(self, batch: pa.RecordBatch, time_us: int, _topics: Topics, _rules: Rules) -> None:
        for epoch, ordinal, id, process, name in rows_of(batch):
            group = self.groups[ordinal]
            member = group.members[id] = Member(id, name, epoch, process, time_us)
            for lease in group.leases_of(id):
                lease.doubt = lease.start
                member.note(lease)

    def _apply_kept(self, batch: pa.RecordBatch, _time_us: int, _topics: Topics, _rules: Rules) -> None:
        for id, end in rows_of(batch):
            if (lease := self.leases.live.get(id)) is not None:
                lease.doubt = end
                self._on_change(lease)

    def _apply_handed(self, batch: pa.RecordBatch, _time_us: int, _topics: Topics, _rules: Rules) -> None:
        for id, old_id, start, count, attempt in rows_of(batch):
            old, end = self.leases.live[old_id], start + count
            part = np.frombuffer(old.copy_mask(), np.uint8)[start - old.start : end - old.start]
            chosen = np.where(part == PENDING, PENDING, NOT_LEASED).astype(np.uint8)
            mask = None if chosen.all() else bytearray(chosen)
            lease = Lease(id, old.group, old.cursor, start, end, attempt, old.member, NEVER_US, mask)
            old.take(start, end, TAKEN)
            self._on_change(old)
            self.leases.add(lease)
            self.groups[lease.group].leases += 1
            self.delivered += lease.pending

    def _apply_fenced(self, batch: pa.RecordBatch, _time_us: int, _topics: Topics, _rules: Rules) -> None:
        for epoch, ordinal, id in rows_of(batch):
            member = self.groups[ordinal].members[id]
            member.epoch, member.fenced = epoch, True

    def _apply_acked(self, rows: Rows, _time_us: int, _topics: Topics, _rules: Rules) -> None:
        for id, start, count in rows:
            if (taken := self._take(id, start, count, ACKED, State.ACKED)) is not None:
                self.acked += count if taken[1] is None else len(taken[1])

    def _apply_retried(self, rows: Rows, time_us: int, _topics: Topics, rules: Rules) -> None:
        found: dict[tuple[int, int], tuple[Cursor, list[tuple[Int64s, int, int]]]] = {}
        for id, start, count, due_us in rows:
            if (taken := self._take(id, start, count, TAKEN, State.RETRYING)) is None:
                continue
            lease, offsets = taken
            if offsets is None:
                offsets = np.arange(start, start + count)
            attempt = lease.attempt + 1
            if due_us == UNSEEN:
                attempt, due_us = lease.attempt, time_us
            elif due_us == RELEASED:
                attempt = max(lease.attempt, subscriptions.repeated(self.groups[lease.group].subscription, rules))
                due_us = time_us
            found.setdefault((lease.group, lease.cursor.queue_id), (lease.cursor, []))[1].append(
                (offsets, attempt, due_us)
            )
        for cursor, parts in found.values():
            sizes = [len(offsets) for offsets, _, _ in parts]
            cursor.retries.put(
                np.concatenate([offsets for offsets, _, _ in parts]),
                attempt=np.repeat([attempt for _, attempt, _ in parts], sizes),
                due_us=np.repeat([due_us for _, _, due_us in parts], sizes),
            )
            self._wake_at({due_us for _, _, due_us in parts}, time_us)

    def _apply_dead(self, rows: Rows, time_us: int, _topics: Topics, _rules: Rules) -> None:
        self._bury(rows, time_us, handed_out=1)

    def _apply_buried(self, rows: Rows, time_us: int, _topics: Topics, _rules: Rules) -> None:
        self._bury(rows, time_us, handed_out=0)

    def _bury(self, rows: Rows, time_us: int, handed_out: int) -> None:
        """Dead letters; the attempt of their lease counts only if they were handed out."""
        found: dict[tuple[int, int], tuple[Cursor, list[Block]]] = {}
        for id, start, count, cause in rows:
            if (taken := self._take(id, start, count, TAKEN, State.DEAD)) is None:
                continue
            lease, offsets = taken
            if offsets is None:
                offsets = np.arange(start, start + count)
            if len(offsets):
                parts = found.setdefault((lease.group, lease.cursor.queue_id), (lease.cursor, []))[1]
                parts.append(block_of(offsets, lease.attempt - 1 + handed_out, time_us, cause))
        for cursor, parts in found.values():
            cursor.dead.bury(parts)

    def _apply_dead_settled(self, batch: pa.RecordBatch, time_us: int, _topics: Topics, _rules: Rules) -> None:
        ordinals, queue_ids, offsets, acts = (column.to_numpy() for column in batch.columns)
        for ordinal, queue_id, act in sorted(
            set(zip(ordinals.tolist(), queue_ids.tolist(), acts.tolist(), strict=True))
        ):
            chosen = np.sort(offsets[(ordinals == ordinal) & (queue_ids == queue_id) & (acts == act)])
            cursor = self.groups[ordinal].meet(queue_id)
            cursor.dead.remove(chosen)
            if act == DISCARD:
                cursor.move(chosen, State.DEAD, State.DISCARDED)
                continue
            cursor.move(chosen, State.DEAD, State.RETRYING)
            size = len(chosen)
            cursor.retries.put(chosen, attempt=np.ones(size, np.int32), due_us=np.full(size, time_us))

    def _apply_edited(self, batch: pa.RecordBatch, time_us: int, _topics: Topics, _rules: Rules) -> None:
        names = ("group", "queue_id", "offset", "position", "message_id")
        for ordinal, queue_id, offset, position, identity in zip(
            *(batch.column(name).to_pylist() for name in names), strict=True
        ):
            cursor, at = self.groups[ordinal].meet(queue_id), np.array([offset], np.int64)
            cursor.edited.put(offset, Edit(position, identity))
            cursor.dead.remove(at)
            cursor.move(at, State.DEAD, State.RETRYING)
            cursor.retries.put(at, attempt=np.ones(1, np.int32), due_us=np.full(1, time_us))

    def _apply_keyed(self, batch: pa.RecordBatch, time_us: int, _topics: Topics, rules: Rules) -> None:
        ordinals, queue_ids, offsets, keys = (column.to_numpy() for column in batch.columns)
        for ordinal, queue_id in sorted(set(zip(ordinals.tolist(), queue_ids.tolist(), strict=True))):
            chosen = np.flatnonzero((ordinals == ordinal) & (queue_ids == queue_id))
            chosen = chosen[np.argsort(offsets[chosen])]
            group = self.groups[ordinal]
            cursor = group.meet(queue_id)
            cursor.retries.tell_keys(offsets[chosen], keys[chosen])
            new = chosen[offsets[chosen] >= cursor.next]
            if len(new):
                cursor.take_up(offsets[new], keys[new], time_us, subscriptions.repeated(group.subscription, rules))

    def _apply_extended(self, rows: Rows, _time_us: int, _topics: Topics, _rules: Rules) -> None:
        for id, deadline_us in rows:
            if (lease := self.leases.live.get(id)) is not None:
                self.leases.extend(lease, deadline_us)

    def apply_trim(self, topics: Topics, position: int) -> None:
        """Retention of the log moved heads of queues. ``position``: what stands below in the log is forgotten."""
        self.deleted = {number: known for number, known in self.deleted.items() if known[1] >= position}
        self.apply_heads(topics)

    def apply_heads(self, topics: Topics, queue_ids: set[int] | None = None) -> None:
        """Retention moved heads of queues (None: maybe of all): what lies below and was not done expires, and is
        counted as such."""
        for group in self.groups.values():
            subscribed = subscriptions.queue_ids(group.subscription.topics, topics)
            met = {*subscribed, *group.cursors}
            for queue_id in sorted(met if queue_ids is None else met & queue_ids):
                head = topics.queues[queue_id].head
                cursor = group.meet(queue_id) if head else group.cursor(queue_id)
                if head <= cursor.base:
                    continue
                for lease in [lease for lease in cursor.leases.values() if lease.start < head]:
                    lease.take(lease.start, min(lease.end, head), TAKEN)
                    self._on_change(lease)
                cursor.trim(head)

    def meet_at(self, topic: str, queue_id: int, start: int) -> None:
        """Give the groups of a topic its new queue, which begins at ``start``."""
        for group in self.groups.values():
            if topic in group.subscription.topics:
                group.cursors.setdefault(queue_id, Cursor(queue_id, start))

    def lose(self, topic: str, queue_ids: Sequence[int]) -> None:
        """Remove a deleted topic from the groups, with its leases and dead letters."""
        for group in self.groups.values():
            cursors = [group.cursors.pop(id) for id in queue_ids if id in group.cursors]
            self._end_leases(group, [lease for cursor in cursors for lease in cursor.leases.values()])
            self.leases.forget(cursors)
            group.subscription = subscriptions.without(group.subscription, topic, set(queue_ids))
            group.paused.pop(topic, None)

    def _apply_failed(self, _batch: pa.RecordBatch, _time_us: int, _topics: Topics, _rules: Rules) -> None:
        """Change nothing: it is for the history of a message."""

    _acts: ClassVar[dict[Kind, Callable[[Groups, pa.RecordBatch, int, Topics, Rules], None]]] = {
        Kind.GROUP: _apply_group,
        Kind.ALTERED: _apply_altered,
        Kind.GROUP_RESET: _apply_reset,
        Kind.GROUP_PAUSED: _apply_paused,
        Kind.GROUP_DELETED: _apply_deleted,
        Kind.DEAD_SETTLED: _apply_dead_settled,
        Kind.EDITED: _apply_edited,
        Kind.JOINED: _apply_joined,
        Kind.KEPT: _apply_kept,
        Kind.HANDED: _apply_handed,
        Kind.FENCED: _apply_fenced,
        Kind.KEYED: _apply_keyed,
        Kind.FAILED: _apply_failed,
    }

    _row_acts: ClassVar[dict[Kind, Callable[[Groups, Rows, int, Topics, Rules], None]]] = {
        Kind.LEASED: _apply_leased,
        Kind.ACKED: _apply_acked,
        Kind.RETRIED: _apply_retried,
        Kind.DEAD: _apply_dead,
        Kind.BURIED: _apply_buried,
        Kind.EXTENDED: _apply_extended,
    }

    KINDS: ClassVar = frozenset({*_acts, *_row_acts})
    """The events of consumer groups."""

    # Looking

    def has_work(self, group: str, topics: Topics, now_us: int) -> bool:
        """Return whether a receive of this group would lease something or pass over something now (leases' limit
        apart), or be refused as the group is gone."""
        if (found := self.by_name.get(group)) is None:
            return True
        ordered = found.subscription.ordered
        if any(members.in_doubt(found, member, topics) for member in found.members.values()):
            return True
        for queue_id in subscriptions.queue_ids(found.flowing, topics):
            cursor = found.cursors.get(queue_id)
            if cursor is None:
                if topics.queues[queue_id].end:
                    return True
            elif ordered and cursor.leases:
                continue
            elif ordered and len(cursor.retries):
                if order.has_work(cursor, topics.queues[queue_id].end, now_us):
                    return True
            elif (len(cursor.retries) and cursor.retries.least_due_us <= now_us) or cursor.next < topics.queues[
                queue_id
            ].end:
                return True
        return False

    @property
    def wake_us(self) -> int:
        """No lease ends and no retry comes due before this; ``NEVER_US``: nothing waits. It may be the time of a retry
        that is gone."""
        deadline = self.leases.wake_us
        return min(deadline, self._retry_times[0]) if self._retry_times else deadline

    def expired(self, now_us: int, limit: int) -> list[Lease]:
        """Return at most ``limit`` leases whose time is over, earliest first. A retry whose time has come is simply
        work from
        now on (:meth:`has_work`)."""
        while self._retry_times and self._retry_times[0] <= now_us:
            heapq.heappop(self._retry_times)
        return self.leases.expired(now_us, limit)

    def _wake_at(self, times: Iterable[int], after_us: int) -> None:
        for time_us in times:
            if time_us > after_us:
                heapq.heappush(self._retry_times, time_us)

    def group(self, name: str) -> Group:
        """Return a group by its name; UNKNOWN_GROUP."""
        if (group := self.by_name.get(name)) is None:
            raise error(Code.UNKNOWN_GROUP, f"no consumer group {name!r}")
        return group

    def names(self) -> dict[int, str]:
        """Return all consumer groups by their numbers, the deleted ones, too, of which the log may hold something."""
        gone = {number: name for number, (name, _) in self.deleted.items()}
        return gone | {number: group.name for number, group in self.groups.items()}

    def describe(self, topics: Topics, rules: Rules) -> list[dict[str, Any]]:
        """Return all groups for people and JSON: see :func:`escrowmq.ledger.groups.reports.describe`."""
        return [reports.describe(group, topics, rules) for group in self.groups.values()]

    def members(self, group: str, topics: Topics) -> list[dict[str, Any]]:
        """List what each member holds: see :func:`escrowmq.ledger.groups.members.describe`; UNKNOWN_GROUP."""
        return members.describe(self.group(group), topics)

    def dead(self, group: str, topics: Topics, topic: str | None = None) -> Parts:
        """Return the dead letters of a group by queue id, of one topic or of all: they may be read while the ledger
        continues. UNKNOWN_GROUP."""
        cursors = self.group(group).cursors
        chosen = cursors if topic is None else set(topics.queue_ids(topic) if topics.has(topic) else ())
        return {id: list(cursor.dead.blocks) for id, cursor in cursors.items() if id in chosen and len(cursor.dead)}

    def dead_letters(
        self,
        group: str,
        topics: Topics,
        limit: int = 100,
        after: Sequence[int] | None = None,
        wanted: Wanted = EVERY,
    ) -> list[dict[str, Any]]:
        """Dead letters by queue id and offset, at most ``limit``, beginning after the pair ``after``; UNKNOWN_GROUP."""
        found = listing.page(self.dead(group, topics), limit, after, wanted)
        return reports.dead_letters(found, topics, self.group(group))

    def account(self, group: str, queue_id: int, topics: Topics) -> dict[str, Int64s]:
        """Every offset of a queue, ``0 .. end``, in exactly one array (I26): ``waiting``, or a state in lower case."""
        cursor = self.group(group).cursor(queue_id)
        found = {state.name.lower(): cursor.offsets_of(state) for state in State}
        return {"waiting": np.arange(cursor.next, topics.queues[queue_id].end), **found}

    # Snapshots

    def snapshot(self) -> dict[str, pa.Table]:
        """Return all of :meth:`freeze` at once."""
        return self.freeze()()

    def freeze(self) -> Callable[[], dict[str, pa.Table]]:
        """Return the state as of now as tables whose names begin with ``groups_``; copies, made in part when it is
        called, on any thread."""
        return snapshots.freeze(self)

    def restore(self, tables: dict[str, pa.Table]) -> None:
        """Become what :meth:`freeze` gave (this one being new)."""
        groups, self.leases, self.next_ordinal, self.delivered, self.acked = snapshots.load(tables)
        self.deleted = snapshots.load_deleted(tables)
        self.groups = {group.ordinal: group for group in groups}
        self.by_name = {group.name: group for group in groups}
        for group in groups:
            for cursor in group.cursors.values():
                self._wake_at(set(cursor.retries["due_us"].tolist()), 0)


def _deliver_first(cursor: Cursor, start: int, end: int, tags: list[int] | None, topics: Topics) -> bytearray | None:
    """Move the cursor over a new range; the mask of what the tags choose of it, None: all."""
    chosen = None if tags is None else receiving.matching(topics.queues[cursor.queue_id], start, end, tags)
    if chosen is None or chosen.all():
        cursor.advance(end, State.LEASED)
        return None
    cursor.advance(end, State.FILTERED)
    cursor.move(np.flatnonzero(chosen) + start, State.FILTERED, State.LEASED)
    return bytearray(np.where(chosen, PENDING, NOT_LEASED).astype(np.uint8))


def _deliver_again(cursor: Cursor, start: int, end: int) -> bytearray | None:
    """Take what waits for a retry in the range; its mask, None: all of the range."""
    return _make_mask(cursor, cursor.retries.cut(*cursor.retries.span(start, end)), start, end)


def _deliver_in_order(cursor: Cursor, start: int, end: int, attempt: int, time_us: int) -> bytearray | None:
    """Take what is free of the range; its mask, None: all of the range."""
    rows = order.waiting(cursor)
    offsets = rows.offsets[order.deliverable(rows, attempt, time_us)]
    first, last = np.searchsorted(offsets, (start, end))
    return _make_mask(cursor, cursor.retries.take(offsets[first:last]), start, end)


def _make_mask(cursor: Cursor, offsets: Int64s, start: int, end: int) -> bytearray | None:
    """Return the mask of a lease of these retries, None: all of the range."""
    cursor.move(offsets, State.RETRYING, State.LEASED)
    if len(offsets) == end - start:
        return None
    mask = bytearray(end - start)
    np.frombuffer(mask, np.uint8)[offsets - start] = PENDING
    return mask
