"""Consumer groups: who may consume what, what is leased, and what became of every message, per group.

Theory of operation:

1. A group has one :class:`~escrowmq.ledger.groups.cursors.Cursor` a queue. Any member may lease from any queue of the group's topics.
2. A lease is a row of a LEASED event: a range of a queue and an attempt. A range that starts at the cursor's ``next`` is a
   first delivery of those of its offsets that the group's tags choose; one below takes what waits for a retry in it.
   The lease's id is the log position of its row.
3. ACKED, RETRIED, DEAD and EXTENDED name a lease and touch only what is pending in it. So a lease that ended can do nothing
   (I27), and an acknowledgement can be repeated.
4. ``decide_…`` change nothing that a snapshot holds; ``apply`` depends on the state and its arguments only.

What may be leased next is ruled in ``receiving.py``, what acknowledgements come to in ``settling.py``, what becomes of
silent members in ``members.py``.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from escrowmq.errors import Code, error
from escrowmq.ledger.columns.sparse import Int64s
from escrowmq.ledger.commands import (
    Decision,
    Event,
    Fence,
    Join,
    Receive,
    Rules,
    Settle,
    SettleDead,
    Subscribe,
    Subscription,
)
from escrowmq.ledger.events import event_of, event_of_rows, rows_of
from escrowmq.ledger.groups import members, receiving, subscriptions
from escrowmq.ledger.groups import reports as group_reports
from escrowmq.ledger.groups import snapshots as group_snapshots
from escrowmq.ledger.groups.cursors import Cursor, Group, State
from escrowmq.ledger.groups.leases import ACKED, NEVER_US, NOT_LEASED, PENDING, TAKEN, Lease, Leases
from escrowmq.ledger.groups.members import Member
from escrowmq.ledger.groups.settling import RELEASED, UNSEEN, Settling
from escrowmq.ledger.groups.subscriptions import TopicsView
from escrowmq.model import member_id
from escrowmq.schemas import ENDED, Kind

_RETRY = 0
_DISCARD = 1


class Groups:
    """All consumer groups of a shard."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.leases = Leases()
        self.delivered = 0
        self.acked = 0
        """Deliveries so far, repeats included."""
        self._by_name: dict[str, Group] = {}
        # Hints for the caller's timer, not state: retry times still to come, and the latest time that a caller spoke of.
        self._wakeups: list[int] = []
        self._seen_us = 0

    # Deciding

    def decide_subscribe(self, cmd: Subscribe, topics: TopicsView, rules: Rules, now_us: int) -> Decision:
        """Make a group or join it. BAD_GROUP_NAME, UNKNOWN_TOPIC, BAD_REQUEST, SUBSCRIPTION_MISMATCH or TOO_MANY."""
        self._seen_us = max(self._seen_us, now_us)
        subscriptions.check(cmd.group, cmd.subscription, topics)
        if (group := self._by_name.get(cmd.group)) is not None:
            if not subscriptions.same(group.subscription, cmd.subscription):
                raise error(Code.SUBSCRIPTION_MISMATCH, f"the consumer group {cmd.group!r} has another subscription")
            return Decision((), {"group": group.ordinal, "created": False})
        if len(self.groups) >= rules.max_groups:
            raise error(Code.TOO_MANY, f"there are {len(self.groups)} consumer groups", "max_groups")
        text = subscriptions.dump(subscriptions.resolve(cmd.subscription, topics))
        return Decision((event_of(Kind.GROUP, [cmd.group], [text]),), {"group": len(self.groups), "created": True})

    def decide_receive(
        self, cmd: Receive, topics: TopicsView, rules: Rules, now_us: int, next_position: int
    ) -> Decision:
        """Lease what ``receiving.py`` rules. UNKNOWN_GROUP, BAD_QUEUE (not a queue of the group's), BAD_REQUEST; in a group
        that holds what is in doubt also FENCED, and what the member has in doubt comes first."""
        self._seen_us = max(self._seen_us, now_us)
        group = self._group(cmd.group)
        if cmd.lease_us < 1:
            raise error(Code.BAD_REQUEST, "a lease is longer than nothing")
        known = subscriptions.queue_ids(group.subscription.topics, topics)
        if cmd.queue_ids is not None:
            if not set(cmd.queue_ids) <= set(known):
                raise error(Code.BAD_QUEUE, f"not a queue of the topics of consumer group {cmd.group!r}")
            known = sorted(set(cmd.queue_ids))
        plan = receiving.Plan(budget=cmd.max_messages, room=rules.max_leases - group.leases)
        handing, deadline_us = members.Handing(), now_us + cmd.lease_us
        if subscriptions.holds(group.subscription):
            member, deadline_us = members.member_of(group, cmd), NEVER_US
            attempts, _, _ = subscriptions.retry_rules(group.subscription, rules)
            handing = members.hand_over(plan, group, member, topics, attempts)
        if not plan.full:
            self._plan(plan, group, receiving.rotated(known, group.turn), topics, now_us)
        events = handing.events(next_position)
        position = next_position + sum(event.batch.num_rows for event in events)
        if (event := plan.event(group.ordinal, cmd.member, deadline_us, position)) is not None:
            events.append(event)
        return Decision(tuple(events), handing.answer(next_position, plan.answer(position)))

    def decide_join(self, cmd: Join, rules: Rules, next_position: int) -> Decision:
        """See :func:`escrowmq.ledger.groups.members.decide_join`; UNKNOWN_GROUP."""
        return Decision(*members.decide_join(self._group(cmd.group), cmd, rules, next_position))

    def decide_fence(self, cmd: Fence, rules: Rules, now_us: int, next_position: int) -> Decision:
        """Give back what a named member holds. UNKNOWN_GROUP, NOT_FOUND."""
        self._seen_us = max(self._seen_us, now_us)
        group = self._group(cmd.group)
        member = group.members.get(member_id(group.name, cmd.instance))
        if member is None or member.name != cmd.instance:
            raise error(Code.NOT_FOUND, f"consumer group {group.name!r} has no member {cmd.instance!r}")
        settling = self._settling(group, rules, now_us)
        for lease in members.leases_of(group, member.id):
            settling.expire(lease, "its consumer was fenced", 0)
        fenced = event_of(Kind.FENCED, [next_position], [group.ordinal], [member.id])
        held = sum(lease.pending for lease in members.leases_of(group, member.id))
        return Decision((fenced, *settling.events()), {"member": member.id, "messages": held})

    def _plan(self, plan: receiving.Plan, group: Group, queue_ids: list[int], topics: TopicsView, now_us: int) -> None:
        ordered, tags = group.subscription.ordered, receiving.tag_numbers(group.subscription.tags, topics)
        for queue_id in queue_ids:
            if plan.full:
                return
            cursor = group.cursor(queue_id)
            if len(cursor.retries):
                receiving.add_retries(plan, cursor, topics.queues[queue_id], ordered, now_us)
        for queue_id in queue_ids:
            if plan.full:
                return
            receiving.add_fresh(plan, group.cursor(queue_id), topics.queues[queue_id], ordered, tags)

    def decide_settle(self, cmd: Settle, topics: TopicsView, rules: Rules, now_us: int, next_position: int) -> Decision:
        """Settle row by row; the codes are OK, LEASE_LOST, BAD_DELAY and BAD_REQUEST. UNKNOWN_GROUP for the whole."""
        self._seen_us = max(self._seen_us, now_us)
        group = self._group(cmd.group)
        settling = self._settling(group, rules, now_us)
        codes = []
        for id, start, count, act, delay_us, cause in rows_of(cmd.batch):
            lease = self.leases.find(id)
            if lease is not None and lease.group != group.ordinal:
                lease = None
            codes.append(settling.settle(lease, start, count, act, delay_us, cause))
        answer = pa.RecordBatch.from_arrays([pa.array(codes, pa.uint8())], schema=ENDED)
        return Decision(settling.events(), answer)

    def decide_settle_dead(self, cmd: SettleDead, topics: TopicsView, rules: Rules, now_us: int) -> Decision:
        """Answer: a code a row, OK or NOT_FOUND (no dead letter there, or named twice). UNKNOWN_GROUP for the whole."""
        self._seen_us = max(self._seen_us, now_us)
        group = self._group(cmd.group)
        found = np.zeros(len(cmd.offsets), bool)
        for queue_id in np.unique(cmd.queue_ids).tolist():
            rows = np.flatnonzero(cmd.queue_ids == queue_id)
            offsets, firsts = np.unique(cmd.offsets[rows], return_index=True)
            found[rows[firsts]] = group.cursor(queue_id).dead.holds(offsets)
        codes = np.where(found, Code.OK, Code.NOT_FOUND).astype(np.uint8)
        if not found.any():
            return Decision((), codes)
        size, act = int(found.sum()), _RETRY if cmd.retry else _DISCARD
        places = (cmd.queue_ids[found], cmd.offsets[found])
        return Decision((event_of(Kind.DEAD_SETTLED, [group.ordinal] * size, *places, [act] * size),), codes)

    def decide_tick(self, topics: TopicsView, rules: Rules, now_us: int, limit: int) -> list[Event]:
        """End leases whose time is over, at most ``limit`` of them."""
        self._seen_us = max(self._seen_us, now_us)
        found: dict[int, list[Lease]] = {}
        for lease in self.leases.expired(now_us, limit):
            found.setdefault(lease.group, []).append(lease)
        retried: list[list[int]] = []
        dead: list[tuple[int, int, int, str]] = []
        for ordinal, leases in found.items():
            settling = self._settling(self.groups[ordinal], rules, now_us)
            for lease in leases:
                settling.expire(lease)
            retried += settling.retried
            dead += settling.dead
        return [event_of_rows(kind, rows) for kind, rows in ((Kind.RETRIED, retried), (Kind.DEAD, dead)) if rows]

    def _settling(self, group: Group, rules: Rules, now_us: int) -> Settling:
        attempts, first_us, most_us = subscriptions.retry_rules(group.subscription, rules)
        return Settling(attempts, first_us, most_us, group.subscription.ordered, now_us, rules.max_delay_us)

    def _group(self, name: str) -> Group:
        if (group := self._by_name.get(name)) is None:
            raise error(Code.UNKNOWN_GROUP, f"no consumer group {name!r}")
        return group

    # Applying

    def apply(
        self, event_kind: Kind, batch: pa.RecordBatch, position: int, time_us: int, topics: TopicsView, rules: Rules
    ) -> None:
        """Take in one event: GROUP, LEASED, ACKED, RETRIED, DEAD, DEAD_SETTLED, EXTENDED, JOINED, KEPT, HANDED or FENCED."""
        self._acts[event_kind](self, batch, time_us, topics, rules)

    def _apply_group(self, batch: pa.RecordBatch, _time_us: int, _topics: TopicsView, _rules: Rules) -> None:
        for row in batch.to_pylist():
            group = Group(len(self.groups), row["name"], subscriptions.load(row["subscription"]))
            group.cursors = {int(id): Cursor(int(id), start) for id, start in group.subscription.starts.items()}
            self.groups.append(group)
            self._by_name[group.name] = group

    def _apply_leased(self, batch: pa.RecordBatch, _time_us: int, topics: TopicsView, _rules: Rules) -> None:
        for id, ordinal, queue_id, start, count, attempt, member, deadline_us in rows_of(batch):
            group = self.groups[ordinal]
            group.turn = queue_id
            cursor, end = group.meet(queue_id), start + count
            if start >= cursor.next:
                tags = receiving.tag_numbers(group.subscription.tags, topics)
                mask = _deliver_first(cursor, start, end, tags, topics)
            else:
                mask = _deliver_again(cursor, start, end)
            lease = Lease(id, ordinal, cursor, start, end, attempt, member, deadline_us, mask)
            if lease.pending:
                self.leases.add(lease)
                group.leases += 1
                self.delivered += lease.pending

    def _take(self, id: int, start: int, count: int, to: int, state: State) -> tuple[Lease, Int64s | None] | None:
        """What is pending of a lease in a range becomes ``state``: the lease and the offsets (None: all the range)."""
        lease = self.leases.live.get(id)
        if lease is None:
            return None
        offsets = lease.take(start, start + count, to)
        if offsets is None:
            lease.cursor.move_run(start, start + count, State.LEASED, state)
        else:
            lease.cursor.move(offsets, State.LEASED, state)
        self._changed(lease)
        return lease, offsets

    def _changed(self, lease: Lease) -> None:
        """Something of a lease is pending no more, or is in doubt now."""
        group = self.groups[lease.group]
        if (member := group.members.get(lease.member)) is not None:
            member.note(lease)
        if not lease.pending:
            group.leases -= 1
            self.leases.end(lease)

    def _apply_joined(self, batch: pa.RecordBatch, time_us: int, _topics: TopicsView, _rules: Rules) -> None:
        for epoch, ordinal, id, process, name in rows_of(batch):
            group = self.groups[ordinal]
            member = group.members[id] = Member(id, name, epoch, process, time_us)
            for lease in members.leases_of(group, id):
                lease.doubt = lease.start
                member.note(lease)

    def _apply_kept(self, batch: pa.RecordBatch, _time_us: int, _topics: TopicsView, _rules: Rules) -> None:
        for id, end in rows_of(batch):
            if (lease := self.leases.live.get(id)) is not None:
                lease.doubt = end
                self._changed(lease)

    def _apply_handed(self, batch: pa.RecordBatch, _time_us: int, _topics: TopicsView, _rules: Rules) -> None:
        for id, old_id, start, count, attempt in rows_of(batch):
            old, end = self.leases.live[old_id], start + count
            part = np.frombuffer(old.copy_mask(), np.uint8)[start - old.start : end - old.start]
            chosen = np.where(part == PENDING, PENDING, NOT_LEASED).astype(np.uint8)
            mask = None if chosen.all() else bytearray(chosen)
            lease = Lease(id, old.group, old.cursor, start, end, attempt, old.member, NEVER_US, mask)
            old.take(start, end, TAKEN)
            self._changed(old)
            self.leases.add(lease)
            self.groups[lease.group].leases += 1
            self.delivered += lease.pending

    def _apply_fenced(self, batch: pa.RecordBatch, _time_us: int, _topics: TopicsView, _rules: Rules) -> None:
        for epoch, ordinal, id in rows_of(batch):
            member = self.groups[ordinal].members[id]
            member.epoch, member.fenced = epoch, True

    def _apply_acked(self, batch: pa.RecordBatch, _time_us: int, _topics: TopicsView, _rules: Rules) -> None:
        for id, start, count in rows_of(batch):
            if (taken := self._take(id, start, count, ACKED, State.ACKED)) is not None:
                self.acked += count if taken[1] is None else len(taken[1])

    def _apply_retried(self, batch: pa.RecordBatch, time_us: int, _topics: TopicsView, rules: Rules) -> None:
        found: dict[tuple[int, int], tuple[Cursor, list[tuple[Int64s, int, int]]]] = {}
        for id, start, count, due_us in rows_of(batch):
            if (taken := self._take(id, start, count, TAKEN, State.RETRYING)) is None:
                continue
            lease, offsets = taken
            if offsets is None:
                offsets = np.arange(start, start + count)
            attempt = lease.attempt + 1
            if due_us == UNSEEN:
                attempt, due_us = lease.attempt, time_us
            elif due_us == RELEASED:
                subscription = self.groups[lease.group].subscription
                attempt = max(lease.attempt, min(2, subscriptions.retry_rules(subscription, rules)[0]))
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
            self._wake_at({due_us for _, _, due_us in parts})

    def _apply_dead(self, batch: pa.RecordBatch, time_us: int, _topics: TopicsView, _rules: Rules) -> None:
        for id, start, count, cause in rows_of(batch):
            if (taken := self._take(id, start, count, TAKEN, State.DEAD)) is None:
                continue
            lease, offsets = taken
            if offsets is None:
                offsets = np.arange(start, start + count)
            lease.cursor.dead.bury(offsets, lease.attempt, time_us, cause)

    def _apply_dead_settled(self, batch: pa.RecordBatch, time_us: int, _topics: TopicsView, _rules: Rules) -> None:
        ordinals, queue_ids, offsets, acts = (column.to_numpy() for column in batch.columns)
        for ordinal, queue_id, act in sorted(
            set(zip(ordinals.tolist(), queue_ids.tolist(), acts.tolist(), strict=True))
        ):
            chosen = np.sort(offsets[(ordinals == ordinal) & (queue_ids == queue_id) & (acts == act)])
            cursor = self.groups[ordinal].meet(queue_id)
            cursor.dead.remove(chosen)
            if act == _DISCARD:
                cursor.move(chosen, State.DEAD, State.DISCARDED)
                continue
            cursor.move(chosen, State.DEAD, State.RETRYING)
            size = len(chosen)
            cursor.retries.put(chosen, attempt=np.ones(size, np.int32), due_us=np.full(size, time_us))

    def _apply_extended(self, batch: pa.RecordBatch, _time_us: int, _topics: TopicsView, _rules: Rules) -> None:
        for id, deadline_us in rows_of(batch):
            if (lease := self.leases.live.get(id)) is not None:
                self.leases.extend(lease, deadline_us)

    def apply_trim(self, topics: TopicsView) -> None:
        """Retention moved heads of queues: what lies below and was not done expires, and is counted as such."""
        for group in self.groups:
            for queue_id in subscriptions.queue_ids(group.subscription.topics, topics):
                head = topics.queues[queue_id].head
                cursor = group.meet(queue_id) if head else group.cursor(queue_id)
                if head <= cursor.base:
                    continue
                for lease in [lease for lease in cursor.leases.values() if lease.start < head]:
                    lease.take(lease.start, min(lease.end, head), TAKEN)
                    self._changed(lease)
                cursor.trim(head)

    _acts: ClassVar[dict[Kind, Callable[[Groups, pa.RecordBatch, int, TopicsView, Rules], None]]] = {
        Kind.GROUP: _apply_group,
        Kind.LEASED: _apply_leased,
        Kind.ACKED: _apply_acked,
        Kind.RETRIED: _apply_retried,
        Kind.DEAD: _apply_dead,
        Kind.DEAD_SETTLED: _apply_dead_settled,
        Kind.EXTENDED: _apply_extended,
        Kind.JOINED: _apply_joined,
        Kind.KEPT: _apply_kept,
        Kind.HANDED: _apply_handed,
        Kind.FENCED: _apply_fenced,
    }

    # Looking

    def has_work(self, group: str, topics: TopicsView, now_us: int) -> bool:
        """Whether a receive of this group would lease something or pass over something now (leases' limit apart)."""
        if (found := self._by_name.get(group)) is None:
            return False
        ordered = found.subscription.ordered
        if any(member.doubted for member in found.members.values()):
            return True
        for queue_id in subscriptions.queue_ids(found.subscription.topics, topics):
            cursor = found.cursors.get(queue_id)
            if cursor is None:
                if topics.queues[queue_id].end:
                    return True
            elif ordered and cursor.leases:
                continue
            elif len(cursor.retries):
                if (cursor.retries.head_due_us if ordered else cursor.retries.least_due_us) <= now_us:
                    return True
                if not ordered and cursor.next < topics.queues[queue_id].end:
                    return True
            elif cursor.next < topics.queues[queue_id].end:
                return True
        return False

    def next_due_us(self) -> int | None:
        """When to look again: the earliest lease deadline (:meth:`decide_tick` ends it) or retry.

        A retry counts until a caller of ``decide_…`` has named a time that is not before it; then it is simply work
        (:meth:`has_work`), so a timer set by this never spins. It may fire for a retry that is gone.
        """
        while self._wakeups and self._wakeups[0] <= self._seen_us:
            heapq.heappop(self._wakeups)
        deadline = self.leases.first_deadline_us()
        if not self._wakeups:
            return deadline
        return self._wakeups[0] if deadline is None else min(self._wakeups[0], deadline)

    def next_retry_us(self, group: str) -> int | None:
        """When this group's first retry is due (in the past: it is), None without one that could be delivered."""
        if (found := self._by_name.get(group)) is None:
            return None
        ordered = found.subscription.ordered
        return min(
            (
                cursor.retries.head_due_us if ordered else cursor.retries.least_due_us
                for cursor in found.cursors.values()
                if len(cursor.retries) and not (ordered and cursor.leases)
            ),
            default=None,
        )

    def _wake_at(self, times: set[int]) -> None:
        for time_us in times:
            if time_us > self._seen_us:
                heapq.heappush(self._wakeups, time_us)

    def names(self) -> list[str]:
        """All consumer groups, by ordinal."""
        return [group.name for group in self.groups]

    def subscription(self, group: str) -> Subscription:
        """What a group subscribes to, ``starts`` included; UNKNOWN_GROUP."""
        return self._group(group).subscription

    def describe(self, topics: TopicsView, now_us: int) -> list[dict[str, Any]]:
        """All groups for people and JSON: see :func:`escrowmq.ledger.groups.reports.describe`."""
        return [group_reports.describe(group, topics) for group in self.groups]

    def members(self, group: str, topics: TopicsView) -> list[dict[str, Any]]:
        """Who holds what: see :func:`escrowmq.ledger.groups.members.describe`; UNKNOWN_GROUP."""
        return members.describe(self._group(group), topics)

    def dead_letters(
        self, group: str, topics: TopicsView, limit: int = 100, after: Sequence[int] | None = None
    ) -> list[dict[str, Any]]:
        """Dead letters by queue id and offset, at most ``limit``, beginning after the pair ``after``; UNKNOWN_GROUP."""
        return group_reports.dead_letters(self._group(group), topics, limit, after)

    def account(self, group: str, queue_id: int, topics: TopicsView) -> dict[str, Int64s]:
        """Every offset of a queue, ``0 .. end``, in exactly one array (I26): ``waiting``, or a state in lower case."""
        cursor = self._group(group).cursor(queue_id)
        found = {state.name.lower(): cursor.offsets_of(state) for state in State}
        return {"waiting": np.arange(cursor.next, topics.queues[queue_id].end), **found}

    # Snapshots

    def snapshot(self) -> dict[str, pa.Table]:
        """The state as tables whose names begin with ``groups_``; copies."""
        return group_snapshots.dump(self)

    def restore(self, tables: dict[str, pa.Table]) -> None:
        """Become what :meth:`snapshot` gave (this one being new)."""
        group_snapshots.load(self, tables)
        self._by_name = {group.name: group for group in self.groups}
        for group in self.groups:
            for cursor in group.cursors.values():
                self._wake_at(set(cursor.retries["due_us"].tolist()))


def _deliver_first(
    cursor: Cursor, start: int, end: int, tags: list[int] | None, topics: TopicsView
) -> bytearray | None:
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
    offsets = cursor.retries.cut(*cursor.retries.span(start, end))
    cursor.move(offsets, State.RETRYING, State.LEASED)
    if len(offsets) == end - start:
        return None
    mask = bytearray(end - start)
    np.frombuffer(mask, np.uint8)[offsets - start] = PENDING
    return mask
