"""The state of all consumer groups of a shard, and how each event changes it.

Theory of operation:

1. A group has one :class:`~escrowmq.ledger.groups.cursors.Cursor` per queue. Any member may lease from any queue of the
   group's topics.
2. A lease is a row of a LEASED event: a range of a queue and an attempt. A range that starts at the cursor's ``next``
   is a first delivery of those of its offsets that match the group's tags; one below redelivers the retries in it (in
   order: those that ``order.py`` allows). The lease's id is the log position of its row.
3. ACKED, RETRIED, DEAD, BURIED and EXTENDED name a lease and change only what is pending in it. So a lease that ended
   has no effect (I27), and an acknowledgement can be repeated.
4. ``operating.py`` decides operator actions on a whole group (reset, pause, limit, delete), ``consuming.py`` the other
   commands. Group numbers are never reused; the name of a deleted group is kept as long as the log may hold its acks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from escrowmq.errors import Code, error
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.columns.schedule import NEVER_US
from escrowmq.ledger.commands import Rules
from escrowmq.ledger.events import rows_of
from escrowmq.ledger.groups import limits, members, order, receiving, reports, snapshots, subscriptions
from escrowmq.ledger.groups.cursors import ACKED, NOT_LEASED, PENDING, TAKEN, Cursor, Lease, State
from escrowmq.ledger.groups.dead import listing
from escrowmq.ledger.groups.dead.letters import Edit, block_of
from escrowmq.ledger.groups.dead.listing import Parts
from escrowmq.ledger.groups.group import ALL, Group, Leases, Member
from escrowmq.ledger.groups.settling import RELEASED, UNSEEN
from escrowmq.ledger.queues.topics import Topics
from escrowmq.schemas import Kind

RETRY: Final = 0  # an act of a DEAD_SETTLED row, as is ``DISCARD``
DISCARD: Final = 1

Rows: TypeAlias = Iterable[Sequence[Any]]  # rows of an event, values in the order of its schema


class At(NamedTuple):
    """The context in which an event is applied."""

    time_us: int
    topics: Topics
    rules: Rules


class Groups:
    """All consumer groups of a shard."""

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}  # by number, in the order of creation
        self.by_name: dict[str, Group] = {}
        self.next_ordinal = 0
        self.deleted: dict[int, tuple[str, int]] = {}  # by number: the name, and the log position of the deletion
        self.leases = Leases()
        self.delivered = 0  # deliveries so far, repeats included
        self.acked = 0
        self._retry_times: list[int] = []  # a heap of times still to come; a hint for the caller's timer, not state

    def apply(
        self, kind: Kind, batch: pa.RecordBatch, time_us: int, topics: Topics, rules: Rules, rows: Rows | None = None
    ) -> None:
        """Change the state by one event of ``KINDS``. ``rows``: the rows of ``batch``, if already decoded."""
        at = At(time_us, topics, rules)
        if (act := self._row_acts.get(kind)) is not None:
            act(self, rows_of(batch) if rows is None else rows, at)
        else:
            self._acts[kind](self, batch, at)

    def _apply_group(self, rows: Rows, _: At) -> None:
        for name, text in rows:
            group = Group(self.next_ordinal, name, subscriptions.load(text))
            self.groups[group.ordinal] = self.by_name[name] = group
            group.add_cursors(group.subscription.starts)
            self.next_ordinal += 1

    def _apply_altered(self, rows: Rows, _: At) -> None:
        for ordinal, text in rows:
            group = self.groups[ordinal]
            group.subscription = subscriptions.load(text)
            group.paused = {t: us for t, us in group.paused.items() if t in (ALL, *group.subscription.topics)}
            group.add_cursors(group.subscription.starts)

    def _apply_reset(self, rows: Rows, _: At) -> None:
        cursors = []
        for ordinal, queue_id, offset in rows:
            cursors.append(cursor := self.groups[ordinal].meet(queue_id))
            self._end_leases(self.groups[ordinal], [cursor])
            cursor.reset(offset)
        self.leases.forget(cursors)

    def _end_leases(self, group: Group, cursors: Iterable[Cursor]) -> None:
        """End all leases of these cursors: later acknowledgements of them are LEASE_LOST."""
        for lease in [lease for cursor in cursors for lease in cursor.leases.values()]:
            self.leases.drop(lease)
            group.leases -= 1
            group.note(lease)

    def _apply_paused(self, rows: Rows, at: At) -> None:
        for ordinal, topic, paused in rows:
            if paused:
                self.groups[ordinal].paused[topic] = at.time_us
            else:
                self.groups[ordinal].paused.pop(topic, None)

    def _apply_limited(self, rows: Rows, at: At) -> None:
        for ordinal, text in rows:
            self.groups[ordinal].limit(limits.load(text), at.time_us)

    def _apply_deleted(self, rows: Rows, _: At) -> None:
        for position, ordinal in rows:
            group = self.groups.pop(ordinal)
            del self.by_name[group.name]
            self._end_leases(group, group.cursors.values())
            self.leases.forget(group.cursors.values())
            self.deleted[ordinal] = (group.name, position)

    def _apply_leased(self, rows: Rows, at: At) -> None:
        for id, ordinal, queue_id, start, count, attempt, member, deadline_us in rows:
            group = self.groups[ordinal]
            group.served = queue_id
            cursor, end = group.meet(queue_id), start + count
            if start >= cursor.next:
                mask = _deliver_first(cursor, start, end, group, at.topics)
            elif group.subscription.ordered:
                mask = _deliver_in_order(cursor, start, end, attempt, at.time_us)
            else:
                mask = _lease_retries(cursor, cursor.retries.cut(*cursor.retries.span(start, end)), start, end)
            lease = Lease(id, ordinal, cursor, start, end, attempt, member, deadline_us, mask)
            if lease.pending:
                self._begin(lease, at.time_us)

    def _begin(self, lease: Lease, time_us: int) -> None:
        self.leases.add(lease)
        group = self.groups[lease.group]
        group.leases += 1
        self.delivered += lease.pending
        if group.bucket is not None:
            group.bucket.take(lease.pending, time_us)
            self._wake_at((group.bucket.ready_us,), time_us)

    def _take(self, id: int, start: int, count: int, to: int, state: State) -> tuple[Lease, Int64s | None] | None:
        """Take those of ``count`` messages from offset ``start`` that are pending in the lease ``id`` out of it: they
        become ``to`` in its mask, and ``state`` in its cursor. Returns the lease and their offsets (None: the whole
        range); None if the lease ended."""
        if (lease := self.leases.live.get(id)) is None:
            return None
        offsets = lease.take(start, start + count, to)
        if offsets is None:
            lease.cursor.move_run(start, start + count, State.LEASED, state)
        else:
            lease.cursor.move(offsets, State.LEASED, state)
        self._on_change(lease)
        return lease, offsets

    def _take_all(self, rows: Rows, state: State) -> dict[Cursor, list[tuple[Lease, Int64s, Any]]]:
        """Take messages out of their leases, for rows of (lease id, start, count, value): those still pending get the
        state ``state``. Returns by cursor, for each row that took some: lease, offsets and value."""
        found: dict[Cursor, list[tuple[Lease, Int64s, Any]]] = {}
        for id, start, count, value in rows:
            if (taken := self._take(id, start, count, TAKEN, state)) is not None:
                lease, offsets = taken
                offsets = np.arange(start, start + count) if offsets is None else offsets
                if len(offsets):
                    found.setdefault(lease.cursor, []).append((lease, offsets, value))
        return found

    def _on_change(self, lease: Lease) -> None:
        """Update the named member after ``lease`` lost messages or some came in doubt; end it if none is pending."""
        group = self.groups[lease.group]
        group.note(lease)
        if not lease.pending:
            group.leases -= 1
            self.leases.end(lease)

    def _apply_joined(self, rows: Rows, at: At) -> None:
        for epoch, ordinal, id, process, name in rows:
            group = self.groups[ordinal]
            group.members[id] = Member(id, name, epoch, process, at.time_us)
            for lease in group.leases_of(id):
                lease.doubt = lease.start
                group.note(lease)

    def _apply_kept(self, rows: Rows, _: At) -> None:
        for id, end in rows:
            if (lease := self.leases.live.get(id)) is not None:
                lease.doubt = end
                self._on_change(lease)

    def _apply_handed(self, rows: Rows, at: At) -> None:
        for id, old_id, start, count, attempt in rows:
            old, end = self.leases.live[old_id], start + count
            part = np.frombuffer(old.copy_mask(), np.uint8)[start - old.start : end - old.start]
            chosen = np.where(part == PENDING, PENDING, NOT_LEASED).astype(np.uint8)
            mask = None if chosen.all() else bytearray(chosen)
            lease = Lease(id, old.group, old.cursor, start, end, attempt, old.member, NEVER_US, mask)
            old.take(start, end, TAKEN)
            self._on_change(old)
            self._begin(lease, at.time_us)

    def _apply_fenced(self, rows: Rows, _: At) -> None:
        for epoch, ordinal, id in rows:
            member = self.groups[ordinal].members[id]
            member.epoch, member.fenced = epoch, True

    def _apply_acked(self, rows: Rows, _: At) -> None:
        for id, start, count in rows:
            if (taken := self._take(id, start, count, ACKED, State.ACKED)) is not None:
                self.acked += count if taken[1] is None else len(taken[1])

    def _apply_retried(self, rows: Rows, at: At) -> None:
        for cursor, parts in self._take_all(rows, State.RETRYING).items():
            again = [(len(offsets), *self._plan_retry(lease, due_us, at)) for lease, offsets, due_us in parts]
            self._give_back(parts, at.time_us)
            sizes, attempts, dues = zip(*again, strict=True)
            offsets = np.concatenate([offsets for _, offsets, _ in parts])
            cursor.retries.put(offsets, attempt=np.repeat(attempts, sizes), due_us=np.repeat(dues, sizes))
            self._wake_at(set(dues), at.time_us)

    def _give_back(self, parts: Iterable[tuple[Lease, Int64s, int]], time_us: int) -> None:
        """Return messages that no consumer received (``due_us`` is UNSEEN) to the rate limits of their groups."""
        for lease, offsets, due_us in parts:
            if due_us == UNSEEN and (bucket := self.groups[lease.group].bucket) is not None:
                bucket.give_back(len(offsets))
                self._wake_at((bucket.ready_us,), time_us)

    def _plan_retry(self, lease: Lease, due_us: int, at: At) -> tuple[int, int]:
        """Return the number of the next attempt of messages given back from ``lease``, and when it is due. ``due_us``:
        this time, or RELEASED or UNSEEN: now, and the attempt is not counted."""
        if due_us == UNSEEN:
            return lease.attempt, at.time_us
        if due_us == RELEASED:
            repeated = subscriptions.repeated(self.groups[lease.group].subscription, at.rules)
            return max(lease.attempt, repeated), at.time_us
        return lease.attempt + 1, due_us

    def _bury(self, rows: Rows, time_us: int, handed_out: int) -> None:
        """Make dead letters of the messages pending in leases, for rows of (lease id, start, count, cause).
        ``handed_out``: 1 to count the lease's attempt, 0 if no consumer received them."""
        for cursor, parts in self._take_all(rows, State.DEAD).items():
            tried = handed_out - 1
            cursor.dead.bury([block_of(at, lease.attempt + tried, time_us, cause) for lease, at, cause in parts])

    def _apply_dead_settled(self, batch: pa.RecordBatch, at: At) -> None:
        ordinals, queue_ids, offsets, acts = (column.to_numpy() for column in batch.columns)
        for ordinal, queue_id, act in np.unique(np.stack([ordinals, queue_ids, acts]), axis=1).T.tolist():
            chosen = np.sort(offsets[(ordinals == ordinal) & (queue_ids == queue_id) & (acts == act)])
            cursor = self.groups[ordinal].meet(queue_id)
            if act == DISCARD:
                cursor.dead.remove(chosen)
                cursor.move(chosen, State.DEAD, State.DISCARDED)
            else:
                _requeue(cursor, chosen, at.time_us)

    def _apply_edited(self, batch: pa.RecordBatch, at: At) -> None:
        for row in batch.select(["group", "queue_id", "offset", "position", "message_id"]).to_pylist():
            cursor = self.groups[row["group"]].meet(row["queue_id"])
            cursor.edited.put(row["offset"], Edit(row["position"], row["message_id"]))
            _requeue(cursor, np.array([row["offset"]], np.int64), at.time_us)

    def _apply_keyed(self, batch: pa.RecordBatch, at: At) -> None:
        ordinals, queue_ids, offsets, keys = (column.to_numpy() for column in batch.columns)
        for ordinal, queue_id in np.unique(np.stack([ordinals, queue_ids]), axis=1).T.tolist():
            chosen = np.flatnonzero((ordinals == ordinal) & (queue_ids == queue_id))
            chosen = chosen[np.argsort(offsets[chosen])]
            group = self.groups[ordinal]
            cursor = group.meet(queue_id)
            cursor.retries.set_keys(offsets[chosen], keys[chosen])
            new = chosen[offsets[chosen] >= cursor.next]
            if len(new):
                repeated = subscriptions.repeated(group.subscription, at.rules)
                cursor.take_up(offsets[new], keys[new], at.time_us, repeated)

    def _apply_extended(self, rows: Rows, _: At) -> None:
        for id, deadline_us in rows:
            if (lease := self.leases.live.get(id)) is not None:
                self.leases.extend(lease, deadline_us)

    def apply_trim(self, topics: Topics, position: int) -> None:
        """Apply retention of the log: forget groups that were deleted below log ``position``, and expire unfinished
        messages that are no longer stored in their queues."""
        self.deleted = {number: known for number, known in self.deleted.items() if known[1] >= position}
        self.apply_heads(topics)

    def apply_heads(self, topics: Topics, queue_ids: set[int] | None = None) -> None:
        """Expire, in every group, the unfinished messages below the heads of these queues (None: of all), and take them
        out of their leases. Called after retention moved the heads."""
        for group in self.groups.values():
            met = {*subscriptions.queue_ids(group.subscription.topics, topics), *group.cursors}
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
        """Let the groups that consume ``topic`` begin at offset ``start`` of its new queue."""
        for group in self.groups.values():
            if topic in group.subscription.topics:
                group.add_cursors({queue_id: start})

    def remove_topic(self, topic: str, queue_ids: Sequence[int]) -> None:
        """Remove a deleted topic from the groups, with its leases and dead letters."""
        for group in self.groups.values():
            cursors = [group.cursors.pop(id) for id in queue_ids if id in group.cursors]
            self._end_leases(group, cursors)
            self.leases.forget(cursors)
            group.subscription = subscriptions.without(group.subscription, topic, set(queue_ids))
            group.paused.pop(topic, None)

    _acts: ClassVar[dict[Kind, Callable[[Groups, pa.RecordBatch, At], None]]] = {
        Kind.DEAD_SETTLED: _apply_dead_settled,
        Kind.EDITED: _apply_edited,
        Kind.KEYED: _apply_keyed,
        Kind.FAILED: lambda *_: None,  # for the history of a message only
    }

    _row_acts: ClassVar[dict[Kind, Callable[[Groups, Rows, At], None]]] = {
        Kind.GROUP: _apply_group,
        Kind.ALTERED: _apply_altered,
        Kind.GROUP_RESET: _apply_reset,
        Kind.GROUP_PAUSED: _apply_paused,
        Kind.GROUP_LIMITED: _apply_limited,
        Kind.GROUP_DELETED: _apply_deleted,
        Kind.JOINED: _apply_joined,
        Kind.KEPT: _apply_kept,
        Kind.HANDED: _apply_handed,
        Kind.FENCED: _apply_fenced,
        Kind.LEASED: _apply_leased,
        Kind.ACKED: _apply_acked,
        Kind.RETRIED: _apply_retried,
        Kind.DEAD: lambda self, rows, at: self._bury(rows, at.time_us, handed_out=1),
        Kind.BURIED: lambda self, rows, at: self._bury(rows, at.time_us, handed_out=0),
        Kind.EXTENDED: _apply_extended,
    }

    KINDS: ClassVar = frozenset({*_acts, *_row_acts})  # the events of consumer groups

    def has_work(self, group: str, topics: Topics, now_us: int) -> bool:
        """Return whether a receive of this group would do anything now: lease messages, pass over some, or fail because
        there is no such group."""
        if (found := self.by_name.get(group)) is None:
            return True
        if any(members.in_doubt(found, member, topics) for member in found.members.values()):
            return True
        if found.limits is not limits.NO_LIMITS and found.room(now_us) <= 0:
            return False
        ordered = found.subscription.ordered
        for queue_id in subscriptions.queue_ids(found.flowing, topics):
            cursor, end = found.cursors.get(queue_id), topics.queues[queue_id].end
            if cursor is None:
                ready = end > 0
            elif ordered and (cursor.leases or len(cursor.retries)):
                ready = order.has_work(cursor, end, now_us)
            else:
                ready = cursor.next < end or (len(cursor.retries) > 0 and cursor.retries.least_due_us <= now_us)
            if ready:
                return True
        return False

    def has_named_members(self, group: str) -> bool:
        """Return whether the group exists and has named members, so that it matters which one receives."""
        return (found := self.by_name.get(group)) is not None and bool(found.members)

    @property
    def has_limits(self) -> bool:
        """Return whether any group has limits."""
        return any(group.limits != limits.NO_LIMITS for group in self.groups.values())

    @property
    def wake_us(self) -> int:
        """A lower bound of the next time (µs) at which a lease expires, a retry is due, or a rate allows messages
        again; ``NEVER_US``: none."""
        deadline = self.leases.wake_us
        return min(deadline, self._retry_times[0]) if self._retry_times else deadline

    def expired(self, now_us: int, limit: int) -> list[Lease]:
        """Return at most ``limit`` leases whose deadline passed, earliest first. Retry times that passed no longer
        count for :attr:`wake_us`: :meth:`has_work` finds those retries."""
        while self._retry_times and self._retry_times[0] <= now_us:
            heapq.heappop(self._retry_times)
        return self.leases.expired(now_us, limit)

    def _wake_at(self, times: Iterable[int], after_us: int) -> None:
        for time_us in times:
            if time_us > after_us:
                heapq.heappush(self._retry_times, time_us)

    def group(self, name: str) -> Group:
        """Return a group by its name. Raises UNKNOWN_GROUP."""
        if (group := self.by_name.get(name)) is None:
            raise error(Code.UNKNOWN_GROUP, f"no consumer group {name!r}")
        return group

    def names(self) -> dict[int, str]:
        """Return the names of all groups by number, with deleted groups that the log may still mention."""
        gone = {number: name for number, (name, _) in self.deleted.items()}
        return gone | {number: group.name for number, group in self.groups.items()}

    def describe(self, topics: Topics, rules: Rules) -> list[dict[str, Any]]:
        """Describe all groups: see :func:`escrowmq.ledger.groups.reports.describe`."""
        return [reports.describe(group, topics, rules) for group in self.groups.values()]

    def members(self, group: str, topics: Topics) -> list[dict[str, Any]]:
        """List what each member holds: see :func:`escrowmq.ledger.groups.members.describe`. Raises UNKNOWN_GROUP."""
        return members.describe(self.group(group), topics)

    def dead(self, group: str, topics: Topics, topic: str | None = None) -> Parts:
        """Return the blocks of a group's dead letters by queue id, of one topic or all. They never change, so any
        thread may read them. Raises UNKNOWN_GROUP."""
        cursors = self.group(group).cursors
        chosen = cursors if topic is None else set(topics.queue_ids(topic) if topics.has(topic) else ())
        return {id: list(cursor.dead.blocks) for id, cursor in cursors.items() if id in chosen and len(cursor.dead)}

    def dead_letters(
        self, group: str, topics: Topics, limit: int = 100, after: Sequence[int] | None = None
    ) -> list[dict[str, Any]]:
        """Describe at most ``limit`` dead letters of a group as dicts, in order of queue id and offset, from behind the
        pair ``after``. Raises UNKNOWN_GROUP."""
        return reports.dead_letters(listing.page(self.dead(group, topics), limit, after), topics, self.group(group))

    def account(self, group: str, queue_id: int, topics: Topics) -> dict[str, Int64s]:
        """Return every offset of a queue in exactly one array (I26): ``waiting``, or a state in lower case."""
        cursor = self.group(group).cursor(queue_id)
        found = {state.name.lower(): cursor.offsets_of(state) for state in State}
        return {"waiting": np.arange(cursor.next, topics.queues[queue_id].end), **found}

    def freeze(self) -> Callable[[], dict[str, pa.Table]]:
        """Return a function that returns the state of now as tables ``groups_*``. It copies dead letters only when it
        is called, which may be later and on any thread."""
        return snapshots.freeze(self)

    def restore(self, tables: dict[str, pa.Table]) -> None:
        """Restore the result of :meth:`freeze` into this new object."""
        snapshots.load(self, tables)
        self.by_name = {group.name: group for group in self.groups.values()}
        for group in self.groups.values():
            for cursor in group.cursors.values():
                self._wake_at(set(cursor.retries["due_us"].tolist()), 0)
            if group.bucket is not None:
                self._wake_at((group.bucket.ready_us,), 0)


def _deliver_first(cursor: Cursor, start: int, end: int, group: Group, topics: Topics) -> bytearray | None:
    """Move ``next`` over the range ``start`` .. ``end``-1: messages that match the group's tags become LEASED, the
    others FILTERED. Returns the mask of their lease; None: all match."""
    tags = receiving.tag_numbers(group.subscription.tags, topics)
    chosen = None if tags is None else receiving.match_tags(topics.queues[cursor.queue_id], start, end, tags)
    if chosen is None or chosen.all():
        cursor.advance(end, State.LEASED)
        return None
    cursor.advance(end, State.FILTERED)
    cursor.move(np.flatnonzero(chosen) + start, State.FILTERED, State.LEASED)
    return bytearray(np.where(chosen, PENDING, NOT_LEASED).astype(np.uint8))


def _deliver_in_order(cursor: Cursor, start: int, end: int, attempt: int, time_us: int) -> bytearray | None:
    """Make the retries of the range LEASED that a lease of this attempt number may hold (``order.py``). Returns the
    mask of their lease; None: all of the range."""
    rows = order.read_waiting(cursor)
    offsets = rows.offsets[order.deliverable(rows, attempt, time_us)]
    first, last = np.searchsorted(offsets, (start, end))
    return _lease_retries(cursor, cursor.retries.take(offsets[first:last]), start, end)


def _lease_retries(cursor: Cursor, offsets: Int64s, start: int, end: int) -> bytearray | None:
    """Make retries at ``offsets``, already removed from the retries, LEASED. Returns the mask of their lease over the
    range ``start`` .. ``end``-1; None: all of it."""
    cursor.move(offsets, State.RETRYING, State.LEASED)
    if len(offsets) == end - start:
        return None
    mask = bytearray(end - start)
    np.frombuffer(mask, np.uint8)[offsets - start] = PENDING
    return mask


def _requeue(cursor: Cursor, offsets: Int64s, time_us: int) -> None:
    """Turn dead letters at rising ``offsets`` into retries due at ``time_us``, with their attempts counted anew."""
    cursor.dead.remove(offsets)
    cursor.move(offsets, State.DEAD, State.RETRYING)
    size = len(offsets)
    cursor.retries.put(offsets, attempt=np.ones(size, np.int32), due_us=np.full(size, time_us))
