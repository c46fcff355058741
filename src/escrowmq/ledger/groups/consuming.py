"""Decides the commands of consumer groups. Reads the state of the groups, changes nothing.

What may be leased next is ruled in ``receiving.py``, what acknowledgements come to in ``settling.py``, what becomes of
silent members in ``members.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from escrowmq.errors import Code, error
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.columns.schedule import NEVER_US
from escrowmq.ledger.commands import (
    AlterGroup,
    Bury,
    Fence,
    Join,
    Receive,
    Rules,
    Settle,
    SettleDead,
    SettleRows,
    Subscribe,
)
from escrowmq.ledger.events import Decision, Event, event_of, event_of_rows, rows_of
from escrowmq.ledger.groups import members, order, receiving, subscriptions
from escrowmq.ledger.groups.cursors import Lease
from escrowmq.ledger.groups.dead.letters import NOT_DEAD
from escrowmq.ledger.groups.group import Group
from escrowmq.ledger.groups.groups import DISCARD, RETRY, Groups
from escrowmq.ledger.groups.order import UNKNOWN, KeysOf
from escrowmq.ledger.groups.settling import RELEASED, Settling, keyed_events
from escrowmq.ledger.queues.topics import Topics
from escrowmq.message.limits import MAX_CAUSE
from escrowmq.model import member_id
from escrowmq.schemas import ENDED, Kind


class Consuming:
    """Decides for consumer groups. It has no state of its own.

    ``keys_of`` gives the keys of messages by their log positions (None: nobody knows them). What it gives must never
    change.
    """

    def __init__(self, groups: Groups, topics: Topics, keys_of: KeysOf | None = None) -> None:
        self._groups = groups
        self._topics = topics
        self.keys_of = keys_of

    def decide_subscribe(self, cmd: Subscribe, topics: Topics, rules: Rules) -> Decision:
        """Make a group or join it; ``topics``: as they will be. BAD_GROUP_NAME, UNKNOWN_TOPIC, BAD_REQUEST,
        SUBSCRIPTION_MISMATCH or TOO_MANY."""
        subscriptions.check(cmd.group, cmd.subscription, topics)
        if (group := self._groups.by_name.get(cmd.group)) is not None:
            had, events = group.subscription, list[Event]()
            if not had.topics:
                had = subscriptions.take_up(had, cmd.subscription, topics)
                events.append(event_of(Kind.ALTERED, [group.ordinal], [subscriptions.dump(had)]))
            if wrong := subscriptions.differences(had, cmd.subscription, rules):
                raise error(Code.SUBSCRIPTION_MISMATCH, f"the consumer group {cmd.group!r} has {wrong}")
            return Decision(tuple(events), {"group": group.ordinal, "created": False, "start": had.start})
        if len(self._groups.groups) >= rules.max_groups:
            raise error(Code.TOO_MANY, f"there are {len(self._groups.groups)} consumer groups", "max_groups")
        text = subscriptions.dump(subscriptions.resolve(cmd.subscription, topics))
        answer = {"group": self._groups.next_ordinal, "created": True, "start": cmd.subscription.start}
        return Decision((event_of(Kind.GROUP, [cmd.group], [text]),), answer)

    def decide_alter(self, cmd: AlterGroup, topics: Topics) -> Decision:
        """Give a group another subscription; ``topics``: as they will be. UNKNOWN_GROUP, UNKNOWN_TOPIC, BAD_REQUEST;
        CONFLICT for another order, or another fate of what is in doubt, while something is leased."""
        group = self._groups.group(cmd.group)
        altered = subscriptions.alter(group.subscription, cmd)
        subscriptions.check(cmd.group, dataclasses.replace(altered, start=cmd.start), topics)
        was = group.subscription
        if group.leases and (altered.ordered, altered.in_doubt) != (was.ordered, was.in_doubt):
            raise error(
                Code.CONFLICT,
                f"consumers of group {cmd.group!r} hold {group.leases} leases",
                "stop them, and wait for their leases to end (`escrowmq groups members`, `escrowmq groups fence`)",
            )
        new = subscriptions.resolve(dataclasses.replace(altered, start=cmd.start), topics)
        starts = {id: start for id, start in new.starts.items() if int(id) not in group.cursors}
        altered = dataclasses.replace(new, start=was.start, starts=was.starts | starts)
        if altered == was:
            return Decision((), altered)
        return Decision((event_of(Kind.ALTERED, [group.ordinal], [subscriptions.dump(altered)]),), altered)

    def decide_receive(self, cmd: Receive, rules: Rules, now_us: int, next_position: int) -> Decision:
        """Lease what ``receiving.py`` rules. UNKNOWN_GROUP, BAD_QUEUE (not a queue of the group's), BAD_REQUEST; in a
        group that holds what is in doubt also FENCED, and what the member has in doubt comes first."""
        group = self._groups.group(cmd.group)
        if cmd.lease_us < 1:
            raise error(Code.BAD_REQUEST, "a lease is longer than nothing")
        known = subscriptions.queue_ids(group.subscription.topics, self._topics)
        if cmd.queue_ids is not None:
            if not set(cmd.queue_ids) <= set(known):
                raise error(Code.BAD_QUEUE, f"not a queue of the topics of consumer group {cmd.group!r}")
            known = sorted(set(cmd.queue_ids))
        if group.paused:
            known = [queue_id for queue_id in known if not self._is_paused(group, queue_id)]
        plan = receiving.Plan(budget=cmd.max_messages, room=rules.max_leases - group.leases)
        handing, deadline_us = members.Handing(), now_us + cmd.lease_us
        if subscriptions.holds(group.subscription):
            member, deadline_us = members.member_of(group, cmd), NEVER_US
            attempts = subscriptions.redelivery(group.subscription, rules).attempts
            handing = members.hand_over(plan, group, member, self._topics, attempts)
        if not plan.full:
            queue_ids = receiving.rotated(known, group.served)
            if not (cmd.one_by_one and self._plan_last(plan, group, queue_ids, now_us, rules)):
                self._plan(plan, group, queue_ids, now_us, subscriptions.repeated(group.subscription, rules))
        events = [*handing.events(next_position), *keyed_events(plan.keyed)]
        position = next_position + sum(event.count for event in events)
        if (event := plan.event(group.ordinal, cmd.member, deadline_us, position)) is not None:
            events.append(event)
        pieces = [*handing.pieces(next_position), *plan.pieces(position)]
        return Decision(tuple(events), receiving.leased(pieces))

    def decide_join(self, cmd: Join, rules: Rules, next_position: int) -> Decision:
        """See :func:`escrowmq.ledger.groups.members.decide_join`; UNKNOWN_GROUP."""
        return Decision(*members.decide_join(self._groups.group(cmd.group), cmd, rules, next_position))

    def decide_fence(self, cmd: Fence, rules: Rules, now_us: int, next_position: int) -> Decision:
        """Give back what a named member holds. UNKNOWN_GROUP, NOT_FOUND."""
        group = self._groups.group(cmd.group)
        member = group.members.get(member_id(group.name, cmd.instance))
        if member is None or member.name != cmd.instance:
            raise error(Code.NOT_FOUND, f"consumer group {group.name!r} has no member {cmd.instance!r}")
        settling = self._settling(group, rules, now_us)
        for lease in group.leases_of(member.id):
            settling.expire(lease, "its consumer was fenced", 0)
        fenced = event_of(Kind.FENCED, [next_position], [group.ordinal], [member.id])
        held = sum(lease.pending for lease in group.leases_of(member.id))
        return Decision((fenced, *settling.events()), {"member": member.id, "messages": held})

    def _plan_last(self, plan: receiving.Plan, group: Group, queue_ids: list[int], now_us: int, rules: Rules) -> bool:
        """Plan what is given for the last time, alone (``members.py``); whether there was such a thing."""
        tags = receiving.tag_numbers(group.subscription.tags, self._topics)
        attempts = subscriptions.redelivery(group.subscription, rules).attempts
        for queue_id in queue_ids:
            cursor, queue = group.cursor(queue_id), self._topics.queues[queue_id]
            if not len(cursor.retries) or int(cursor.retries["attempt"].max()) < attempts:
                continue
            if group.subscription.ordered:
                next_one = None if cursor.leases else order.next_attempt(order.waiting(cursor), now_us)
                if next_one is not None and next_one >= attempts:
                    repeated = min(2, attempts)
                    receiving.add_in_order(
                        plan, group.ordinal, cursor, queue, tags, now_us, repeated, self._keys_of(group)
                    )
                    return True
            elif receiving.add_last(plan, cursor, queue, now_us, attempts):
                return True
        return False

    def _is_paused(self, group: Group, queue_id: int) -> bool:
        return group.is_paused(self._topics.queues[queue_id].place.topic)

    def _plan(self, plan: receiving.Plan, group: Group, queue_ids: list[int], now_us: int, repeated: int) -> None:
        topics, ordered = self._topics, group.subscription.ordered
        tags = receiving.tag_numbers(group.subscription.tags, topics)
        met = [(group.cursor(queue_id), topics.queues[queue_id]) for queue_id in queue_ids]
        for cursor, queue in met:
            if not len(cursor.retries):
                continue
            if plan.full:
                return
            if ordered:
                receiving.add_in_order(plan, group.ordinal, cursor, queue, tags, now_us, repeated, self._keys_of(group))
            else:
                receiving.add_retries(plan, cursor, queue, now_us)
        for cursor, queue in met:
            if cursor.next < queue.end:
                if plan.full:
                    return
                receiving.add_fresh(plan, cursor, queue, ordered, tags, repeated)

    def decide_settle(self, cmd: Settle, rules: Rules, now_us: int) -> Decision:
        """Settle row by row; the codes are OK, LEASE_LOST, BAD_DELAY and BAD_REQUEST. UNKNOWN_GROUP for the whole."""
        codes, events = self._settle(self._groups.group(cmd.group), rows_of(cmd.batch), rules, now_us)
        return Decision(events, pa.RecordBatch.from_arrays([pa.array(codes, pa.uint8())], schema=ENDED))

    def decide_settle_few(self, cmd: SettleRows, rules: Rules, now_us: int) -> Decision | None:
        """As :meth:`decide_settle`, of rows; None for UNKNOWN_GROUP."""
        if (group := self._groups.by_name.get(cmd.group)) is None:
            return None
        codes, events = self._settle(group, chain.from_iterable(part.rows for part in cmd.parts), rules, now_us)
        return Decision(events, bytes(codes))

    def _settle(
        self, group: Group, rows: Iterable[tuple[Any, ...]], shard: Rules, now_us: int
    ) -> tuple[list[Code], tuple[Event, ...]]:
        settling, find = self._settling(group, shard, now_us), self._groups.leases.find
        codes = []
        for id, start, count, act, delay_us, cause in rows:
            lease = find(id)
            if lease is not None and lease.group != group.ordinal:
                lease = None
            codes.append(settling.settle(lease, start, count, act, delay_us, cause))
        return codes, settling.events()

    def decide_bury(self, cmd: Bury) -> Decision:
        """Dead letters of what is pending in its lease; what is not is passed over. UNKNOWN_GROUP."""
        group = self._groups.group(cmd.group)
        rows = []
        for id, offset, cause in cmd.rows:
            lease = self._groups.leases.live.get(id)
            if lease is not None and lease.group == group.ordinal and lease.holds(offset):
                rows.append((id, offset, 1, cause[:MAX_CAUSE]))
        return Decision((event_of_rows(Kind.BURIED, rows),) if rows else (), len(rows))

    def decide_settle_dead(self, cmd: SettleDead) -> Decision:
        """Answer: one code per row: OK, NOT_FOUND (no dead letter there, or named twice), or CONFLICT (it is another
        death now). UNKNOWN_GROUP for the whole."""
        group = self._groups.group(cmd.group)
        found = np.zeros(len(cmd.offsets), bool)
        codes = np.full(len(cmd.offsets), Code.NOT_FOUND, np.uint8)
        for queue_id in np.unique(cmd.queue_ids).tolist():
            rows = np.flatnonzero(cmd.queue_ids == queue_id)
            offsets, firsts = np.unique(cmd.offsets[rows], return_index=True)
            died_us, _ = group.cursor(queue_id).dead.deaths(offsets)
            rows = rows[firsts]
            other = np.zeros(len(rows), bool) if cmd.dead_us is None else died_us != cmd.dead_us[rows]
            found[rows] = (died_us != NOT_DEAD) & ~other
            codes[rows[(died_us != NOT_DEAD) & other]] = Code.CONFLICT
        codes[found] = Code.OK
        if not found.any():
            return Decision((), codes)
        size, act = int(found.sum()), RETRY if cmd.retry else DISCARD
        places = (cmd.queue_ids[found], cmd.offsets[found])
        events = [event_of(Kind.DEAD_SETTLED, [group.ordinal] * size, *places, [act] * size)]
        if cmd.retry and group.subscription.ordered:
            of_queue = [(queue_id, places[1][places[0] == queue_id]) for queue_id in np.unique(places[0]).tolist()]
            keys_of = self._keys_of(group)
            events += keyed_events([(group.ordinal, id, offsets, keys_of(id, offsets)) for id, offsets in of_queue])
        return Decision(tuple(events), codes)

    def decide_tick(self, rules: Rules, now_us: int, limit: int) -> list[Event]:
        """End leases whose time is over, at most ``limit`` of them. While a group is paused that counts no attempt."""
        found: dict[int, list[Lease]] = {}
        for lease in self._groups.expired(now_us, limit):
            found.setdefault(lease.group, []).append(lease)
        retried: list[list[int]] = []
        dead: list[tuple[int, int, int, str]] = []
        keyed: list[tuple[int, int, Int64s, Int64s]] = []
        for ordinal, leases in found.items():
            group = self._groups.groups[ordinal]
            settling = self._settling(group, rules, now_us)
            unseen = members.unreached(group, leases, settling.redelivery.attempts)
            for lease in unseen:
                settling.give_up(lease)
            for lease in leases:
                if lease in unseen:
                    continue
                if group.paused and self._is_paused(group, lease.cursor.queue_id):
                    settling.give_up(lease, RELEASED)
                else:
                    settling.expire(lease)
            retried += settling.retried
            dead += settling.dead
            keyed += settling.keyed
        events = [event_of_rows(kind, rows) for kind, rows in ((Kind.RETRIED, retried), (Kind.DEAD, dead)) if rows]
        return events + keyed_events(keyed)

    def _settling(self, group: Group, rules: Rules, now_us: int) -> Settling:
        redelivery, ordered = subscriptions.redelivery(group.subscription, rules), group.subscription.ordered
        return Settling(redelivery, ordered, now_us, rules.max_delay_us, self._keys_of(group))

    def _keys_of(self, group: Group) -> Callable[[int, Int64s], Int64s]:
        """Asks for the keys of what a group gets at stored offsets of a queue."""

        def keys(queue_id: int, offsets: Int64s) -> Int64s:
            if self.keys_of is None or not len(offsets):
                return np.full(len(offsets), UNKNOWN)
            first = int(offsets.min())
            positions = self._topics.queues[queue_id].positions(first, int(offsets.max()) + 1)[offsets - first]
            return self.keys_of(group.cursor(queue_id).edited.instead(offsets, positions))

        return keys
