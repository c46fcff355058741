"""Decides the commands of consumer groups. Reads the state of the groups, changes nothing.

What may be leased next is ruled in ``receiving.py``, what acknowledgements come to in ``settling.py``, what becomes of
silent members in ``members.py``.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from escrowmq.errors import Code, error
from escrowmq.ledger.columns.schedule import NEVER_US
from escrowmq.ledger.commands import Fence, Join, Receive, Rules, Settle, SettleDead, Subscribe
from escrowmq.ledger.events import Decision, Event, event_of, event_of_rows, rows_of
from escrowmq.ledger.groups import members, receiving, subscriptions
from escrowmq.ledger.groups.cursors import Lease
from escrowmq.ledger.groups.group import Group
from escrowmq.ledger.groups.groups import DISCARD, RETRY, Groups
from escrowmq.ledger.groups.settling import Settling
from escrowmq.ledger.queues.topics import Topics
from escrowmq.model import member_id
from escrowmq.schemas import ENDED, Kind


class Consuming:
    """Decides for consumer groups. It has no state of its own."""

    def __init__(self, groups: Groups, topics: Topics) -> None:
        self._groups = groups
        self._topics = topics

    def decide_subscribe(self, cmd: Subscribe, topics: Topics, rules: Rules) -> Decision:
        """Make a group or join it; ``topics``: as they will be. BAD_GROUP_NAME, UNKNOWN_TOPIC, BAD_REQUEST, SUBSCRIPTION_MISMATCH or TOO_MANY."""
        subscriptions.check(cmd.group, cmd.subscription, topics)
        if (group := self._groups.by_name.get(cmd.group)) is not None:
            if not subscriptions.same(group.subscription, cmd.subscription):
                raise error(Code.SUBSCRIPTION_MISMATCH, f"the consumer group {cmd.group!r} has another subscription")
            return Decision((), {"group": group.ordinal, "created": False})
        if len(self._groups.groups) >= rules.max_groups:
            raise error(Code.TOO_MANY, f"there are {len(self._groups.groups)} consumer groups", "max_groups")
        text = subscriptions.dump(subscriptions.resolve(cmd.subscription, topics))
        return Decision(
            (event_of(Kind.GROUP, [cmd.group], [text]),), {"group": len(self._groups.groups), "created": True}
        )

    def decide_receive(self, cmd: Receive, rules: Rules, now_us: int, next_position: int) -> Decision:
        """Lease what ``receiving.py`` rules. UNKNOWN_GROUP, BAD_QUEUE (not a queue of the group's), BAD_REQUEST; in a group
        that holds what is in doubt also FENCED, and what the member has in doubt comes first."""
        group = self._groups.group(cmd.group)
        if cmd.lease_us < 1:
            raise error(Code.BAD_REQUEST, "a lease is longer than nothing")
        known = subscriptions.queue_ids(group.subscription.topics, self._topics)
        if cmd.queue_ids is not None:
            if not set(cmd.queue_ids) <= set(known):
                raise error(Code.BAD_QUEUE, f"not a queue of the topics of consumer group {cmd.group!r}")
            known = sorted(set(cmd.queue_ids))
        plan = receiving.Plan(budget=cmd.max_messages, room=rules.max_leases - group.leases)
        handing, deadline_us = members.Handing(), now_us + cmd.lease_us
        if subscriptions.holds(group.subscription):
            member, deadline_us = members.member_of(group, cmd), NEVER_US
            attempts, _, _ = subscriptions.retry_rules(group.subscription, rules)
            handing = members.hand_over(plan, group, member, self._topics, attempts)
        if not plan.full:
            self._plan(plan, group, receiving.rotated(known, group.served), now_us)
        events = handing.events(next_position)
        position = next_position + sum(event.batch.num_rows for event in events)
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

    def _plan(self, plan: receiving.Plan, group: Group, queue_ids: list[int], now_us: int) -> None:
        topics, ordered = self._topics, group.subscription.ordered
        tags = receiving.tag_numbers(group.subscription.tags, topics)
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

    def decide_settle(self, cmd: Settle, rules: Rules, now_us: int) -> Decision:
        """Settle row by row; the codes are OK, LEASE_LOST, BAD_DELAY and BAD_REQUEST. UNKNOWN_GROUP for the whole."""
        group = self._groups.group(cmd.group)
        settling = self._settling(group, rules, now_us)
        codes = []
        for id, start, count, act, delay_us, cause in rows_of(cmd.batch):
            lease = self._groups.leases.find(id)
            if lease is not None and lease.group != group.ordinal:
                lease = None
            codes.append(settling.settle(lease, start, count, act, delay_us, cause))
        answer = pa.RecordBatch.from_arrays([pa.array(codes, pa.uint8())], schema=ENDED)
        return Decision(settling.events(), answer)

    def decide_settle_dead(self, cmd: SettleDead) -> Decision:
        """Answer: one code per row, OK or NOT_FOUND (no dead letter there, or named twice). UNKNOWN_GROUP for the whole."""
        group = self._groups.group(cmd.group)
        found = np.zeros(len(cmd.offsets), bool)
        for queue_id in np.unique(cmd.queue_ids).tolist():
            rows = np.flatnonzero(cmd.queue_ids == queue_id)
            offsets, firsts = np.unique(cmd.offsets[rows], return_index=True)
            found[rows[firsts]] = group.cursor(queue_id).dead.holds(offsets)
        codes = np.where(found, Code.OK, Code.NOT_FOUND).astype(np.uint8)
        if not found.any():
            return Decision((), codes)
        size, act = int(found.sum()), RETRY if cmd.retry else DISCARD
        places = (cmd.queue_ids[found], cmd.offsets[found])
        return Decision((event_of(Kind.DEAD_SETTLED, [group.ordinal] * size, *places, [act] * size),), codes)

    def decide_tick(self, rules: Rules, now_us: int, limit: int) -> list[Event]:
        """End leases whose time is over, at most ``limit`` of them."""
        found: dict[int, list[Lease]] = {}
        for lease in self._groups.expired(now_us, limit):
            found.setdefault(lease.group, []).append(lease)
        retried: list[list[int]] = []
        dead: list[tuple[int, int, int, str]] = []
        for ordinal, leases in found.items():
            settling = self._settling(self._groups.groups[ordinal], rules, now_us)
            for lease in leases:
                settling.expire(lease)
            retried += settling.retried
            dead += settling.dead
        return [event_of_rows(kind, rows) for kind, rows in ((Kind.RETRIED, retried), (Kind.DEAD, dead)) if rows]

    def _settling(self, group: Group, rules: Rules, now_us: int) -> Settling:
        attempts, first_us, most_us = subscriptions.retry_rules(group.subscription, rules)
        return Settling(attempts, first_us, most_us, group.subscription.ordered, now_us, rules.max_delay_us)
