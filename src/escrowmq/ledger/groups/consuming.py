"""Decides the commands of consumer groups. Reads the state of the groups, changes nothing.

``receiving.py`` has the rules for leases, ``settling.py`` those for acknowledgements, ``members.py`` those for silent
members.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from escrowmq.errors import Code, error
from escrowmq.ledger import commands
from escrowmq.ledger.columns.arrays import Int64s
from escrowmq.ledger.columns.schedule import NEVER_US
from escrowmq.ledger.commands import Rules
from escrowmq.ledger.events import Decision, Event, event_of, event_of_rows, rows_of
from escrowmq.ledger.groups import limits, members, order, receiving, subscriptions
from escrowmq.ledger.groups.cursors import PENDING, Cursor, Lease
from escrowmq.ledger.groups.dead.letters import NOT_DEAD
from escrowmq.ledger.groups.group import Group
from escrowmq.ledger.groups.groups import DISCARD, RETRY, Groups
from escrowmq.ledger.groups.order import UNKNOWN, KeysOf
from escrowmq.ledger.groups.settling import RELEASED, Settling, keyed_events
from escrowmq.ledger.queues.queues import QueueIndex
from escrowmq.ledger.queues.topics import Topics
from escrowmq.message.limits import MAX_CAUSE
from escrowmq.model import member_id
from escrowmq.schemas import ENDED, Kind


@dataclass(slots=True)
class Consuming:
    """Decides for consumer groups. It has no state of its own. ``keys_of`` maps log positions to the keys of messages,
    which never change (None: unknown)."""

    groups: Groups
    topics: Topics
    keys_of: KeysOf | None = None

    def decide_subscribe(self, cmd: commands.Subscribe, topics: Topics, rules: Rules) -> Decision:
        """Decide that a group is created, or that a member may join it with this subscription. ``topics``: all topics,
        with those that this command creates. Answer: ``group`` (its number), ``created``, ``start``, ``max_attempts``.
        Raises BAD_GROUP_NAME, UNKNOWN_TOPIC, BAD_REQUEST, SUBSCRIPTION_MISMATCH or TOO_MANY."""
        subscriptions.check(cmd.group, cmd.subscription, topics)
        if (group := self.groups.by_name.get(cmd.group)) is not None:
            had, events = group.subscription, list[Event]()
            if not had.topics:
                had = subscriptions.take_up(had, cmd.subscription, topics)
                events.append(event_of(Kind.ALTERED, [group.ordinal], [subscriptions.dump(had)]))
            if wrong := subscriptions.differences(had, cmd.subscription, rules):
                raise error(Code.SUBSCRIPTION_MISMATCH, f"the consumer group {cmd.group!r} has {wrong}")
            known = {"start": had.start, "max_attempts": subscriptions.redelivery(had, rules).attempts}
            return Decision(tuple(events), {"group": group.ordinal, "created": False, **known})
        if len(self.groups.groups) >= rules.max_groups:
            raise error(Code.TOO_MANY, f"there are {len(self.groups.groups)} consumer groups", "max_groups")
        text = subscriptions.dump(subscriptions.resolve(cmd.subscription, topics))
        known = {
            "start": cmd.subscription.start,
            "max_attempts": subscriptions.redelivery(cmd.subscription, rules).attempts,
        }
        answer = {"group": self.groups.next_ordinal, "created": True, **known}
        return Decision((event_of(Kind.GROUP, [cmd.group], [text]),), answer)

    def decide_alter(self, cmd: commands.AlterGroup, topics: Topics) -> Decision:
        """Decide a change of a group's subscription; the answer is the new one. ``topics``: all topics, with those that
        this command creates. Raises UNKNOWN_GROUP, UNKNOWN_TOPIC, BAD_REQUEST; CONFLICT for a change of order or
        ``in_doubt`` while messages are leased."""
        group = self.groups.group(cmd.group)
        altered = subscriptions.alter(group.subscription, cmd)
        subscriptions.check(cmd.group, dataclasses.replace(altered, start=cmd.start), topics)
        was = group.subscription
        if group.leases and (altered.ordered, altered.in_doubt) != (was.ordered, was.in_doubt):
            hint = "stop them, and wait for their leases to end (`escrowmq groups members`, `escrowmq groups fence`)"
            raise error(Code.CONFLICT, f"consumers of group {cmd.group!r} hold {group.leases} leases", hint)
        new = subscriptions.resolve(dataclasses.replace(altered, start=cmd.start), topics)
        starts = {id: start for id, start in new.starts.items() if int(id) not in group.cursors}
        altered = dataclasses.replace(new, start=was.start, starts=was.starts | starts)
        event = event_of(Kind.ALTERED, [group.ordinal], [subscriptions.dump(altered)])
        return Decision(() if altered == was else (event,), altered)

    def decide_receive(self, cmd: commands.Receive, rules: Rules, now_us: int, next_position: int) -> Decision:
        """Decide which messages a member leases, by the rules of ``receiving.py``. In a group with ``in_doubt="hold"``
        the member first gets its messages in doubt. Raises UNKNOWN_GROUP, BAD_QUEUE (not a queue of the group's),
        BAD_REQUEST, FENCED (a named member that a newer process replaced, or an operator fenced)."""
        group = self.groups.group(cmd.group)
        if cmd.lease_us < 1:
            raise error(Code.BAD_REQUEST, "a lease is longer than nothing")
        known = subscriptions.queue_ids(group.subscription.topics, self.topics)
        if cmd.queue_ids is not None:
            if not set(cmd.queue_ids) <= set(known):
                raise error(Code.BAD_QUEUE, f"not a queue of the topics of consumer group {cmd.group!r}")
            known = sorted(set(cmd.queue_ids))
        if group.paused:
            known = [queue_id for queue_id in known if not self._is_paused(group, queue_id)]
        attempts = subscriptions.redelivery(group.subscription, rules).attempts
        plan = receiving.Plan(
            group=group.ordinal,
            ordered=group.subscription.ordered,
            tags=receiving.tag_numbers(group.subscription.tags, self.topics),
            now_us=now_us,
            repeated=min(2, attempts),
            keys_of=self._keys_of(group),
            budget=cmd.max_messages,
            room=rules.max_leases - group.leases,
        )
        handing, deadline_us = members.Handing(), now_us + cmd.lease_us
        if subscriptions.holds(group.subscription):
            member, deadline_us = members.member_of(group, cmd), NEVER_US
            handing = members.hand_over(plan, group, member, self.topics, attempts)
        if group.limits is not limits.NO_LIMITS:
            self._limit(plan, group)
        if not plan.full:
            queue_ids = receiving.rotate(known, group.served)
            met = [(group.cursor(queue_id), self.topics.queues[queue_id]) for queue_id in queue_ids]
            if not (cmd.one_by_one and _plan_last(plan, met, attempts)):
                plan.fill(met)
        events = [*handing.events(next_position), *keyed_events(plan.keyed)]
        position = next_position + sum(event.count for event in events)
        events += plan.event(cmd.member, deadline_us, position)
        pieces = [*handing.pieces(next_position), *plan.pieces(position)]
        return Decision(tuple(events), receiving.collect_leased(pieces))

    def _limit(self, plan: receiving.Plan, group: Group) -> None:
        """Lower the budget of ``plan`` to what the limits of the group allow, and set its limit per key."""
        plan.budget = min(plan.budget, group.room(plan.now_us))
        if (most := group.limits.in_flight_per_key) is not None:
            plan.by_key = limits.KeyRoom(most, self._keys_in_flight(group))

    def decide_join(self, cmd: commands.Join, rules: Rules, next_position: int) -> Decision:
        """See :func:`escrowmq.ledger.groups.members.decide_join`; UNKNOWN_GROUP."""
        return Decision(*members.decide_join(self.groups.group(cmd.group), cmd, rules, next_position))

    def decide_fence(self, cmd: commands.Fence, rules: Rules, now_us: int, next_position: int) -> Decision:
        """Fence a named member: its process can no longer receive, and its leases end as if they had expired, but
        without a delay before the retry. Answer: ``member`` and ``messages``, how many it held. Raises UNKNOWN_GROUP,
        NOT_FOUND (no such member)."""
        group = self.groups.group(cmd.group)
        member = group.members.get(member_id(group.name, cmd.instance))
        if member is None or member.name != cmd.instance:
            raise error(Code.NOT_FOUND, f"consumer group {group.name!r} has no member {cmd.instance!r}")
        settling = self._settling(group, rules, now_us)
        for lease in group.leases_of(member.id):
            settling.expire(lease, "its consumer was fenced", 0)
        fenced = event_of(Kind.FENCED, [next_position], [group.ordinal], [member.id])
        held = sum(lease.pending for lease in group.leases_of(member.id))
        return Decision((fenced, *settling.events()), {"member": member.id, "messages": held})

    def _is_paused(self, group: Group, queue_id: int) -> bool:
        return group.is_paused(self.topics.queues[queue_id].place.topic)

    def decide_settle(self, cmd: commands.Settle, rules: Rules, now_us: int) -> Decision:
        """Decide acknowledgements. Answer: a code per row: OK, LEASE_LOST, BAD_DELAY, BAD_REQUEST. Raises
        UNKNOWN_GROUP."""
        codes, events = self._settle(self.groups.group(cmd.group), rows_of(cmd.batch), rules, now_us)
        return Decision(events, pa.RecordBatch.from_arrays([pa.array(codes, pa.uint8())], schema=ENDED))

    def decide_settle_few(self, cmd: commands.SettleRows, rules: Rules, now_us: int) -> Decision | None:
        """As :meth:`decide_settle`, of rows; None for UNKNOWN_GROUP."""
        if (group := self.groups.by_name.get(cmd.group)) is None:
            return None
        codes, events = self._settle(group, chain.from_iterable(part.rows for part in cmd.parts), rules, now_us)
        return Decision(events, bytes(codes))

    def _settle(
        self, group: Group, rows: Iterable[tuple[Any, ...]], rules: Rules, now_us: int
    ) -> tuple[list[Code], tuple[Event, ...]]:
        settling, find, codes = self._settling(group, rules, now_us), self.groups.leases.find, []
        for id, start, count, act, delay_us, cause in rows:
            lease = find(id)
            mine = lease if lease is not None and lease.group == group.ordinal else None
            codes.append(settling.settle(mine, start, count, act, delay_us, cause))
        return codes, settling.events()

    def decide_bury(self, cmd: commands.Bury) -> Decision:
        """Decide that leased messages become dead letters, without counting the attempt; those that are no longer
        pending in their lease are skipped. Answer: the number of dead letters. Raises UNKNOWN_GROUP."""
        group = self.groups.group(cmd.group)
        rows = []
        for id, offset, cause in cmd.rows:
            lease = self.groups.leases.live.get(id)
            if lease is not None and lease.group == group.ordinal and lease.holds(offset):
                rows.append((id, offset, 1, cause[:MAX_CAUSE]))
        return Decision((event_of_rows(Kind.BURIED, rows),) if rows else (), len(rows))

    def decide_settle_dead(self, cmd: commands.SettleDead) -> Decision:
        """Decide that dead letters are retried or discarded. Answer: a code for each row: OK, NOT_FOUND (no dead
        letter, or named twice), or CONFLICT (it died at another time than the command says). Raises UNKNOWN_GROUP."""
        group = self.groups.group(cmd.group)
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
        """Return the events that end at most ``limit`` expired leases: their messages are retried, or dead letters. No
        attempt is counted for paused topics, nor for messages that the consumer cannot have started."""
        found: dict[int, list[Lease]] = {}
        for lease in self.groups.expired(now_us, limit):
            found.setdefault(lease.group, []).append(lease)
        shared: dict[str, list[Any]] = {"retried": [], "dead": [], "keyed": []}
        events: tuple[Event, ...] = ()
        for ordinal, leases in found.items():
            group = self.groups.groups[ordinal]
            settling = self._settling(group, rules, now_us, **shared)
            unseen = members.find_unreached(group, leases, settling.redelivery.attempts)
            for lease in unseen:
                settling.give_up(lease)
            for lease in leases:
                if lease in unseen:
                    continue
                if self._is_paused(group, lease.cursor.queue_id):
                    settling.give_up(lease, RELEASED)
                else:
                    settling.expire(lease)
            events = settling.events()
        return list(events)

    def _settling(self, group: Group, rules: Rules, now_us: int, **shared: Any) -> Settling:
        redelivery, ordered = subscriptions.redelivery(group.subscription, rules), group.subscription.ordered
        return Settling(redelivery, ordered, now_us, rules.max_delay_us, self._keys_of(group), **shared)

    def _keys_in_flight(self, group: Group) -> Int64s:
        """Return the key of each leased message of a group, one item per message. The keys of a lease are read from the
        log once, then cached in the lease."""
        found, keys_of = [_NO_KEYS], self._keys_of(group)
        for cursor in group.cursors.values():
            for lease in cursor.leases.values():
                if lease.keys is None:
                    lease.keys = np.full(lease.end - lease.start, UNKNOWN)
                    pending = lease.pending_offsets(lease.start)
                    lease.keys[pending - lease.start] = keys_of(cursor.queue_id, pending)
                pending = np.frombuffer(lease.copy_mask(), np.uint8) == PENDING
                found.append(lease.keys[pending])
        return np.concatenate(found)

    def _keys_of(self, group: Group) -> Callable[[int, Int64s], Int64s]:
        """Return a function of (queue id, offsets) that reads the keys of the group's messages there; UNKNOWN if this
        object has no source of keys."""

        def keys(queue_id: int, offsets: Int64s) -> Int64s:
            if self.keys_of is None or not len(offsets):
                return np.full(len(offsets), UNKNOWN)
            first = int(offsets.min())
            positions = self.topics.queues[queue_id].positions(first, int(offsets.max()) + 1)[offsets - first]
            return self.keys_of(group.cursor(queue_id).edited.instead(offsets, positions))

        return keys


_NO_KEYS: Int64s = np.empty(0, np.int64)


def _plan_last(plan: receiving.Plan, met: Sequence[tuple[Cursor, QueueIndex]], attempts: int) -> bool:
    """Add to ``plan``, from the queues ``met``, the first message that is due for attempt ``attempts``, the last one,
    and no other message (in order: with others of that attempt, as one lease). Returns whether there was one; see
    ``members.py``."""
    for cursor, queue in met:
        if not len(cursor.retries) or int(cursor.retries["attempt"].max()) < attempts:
            continue
        if plan.ordered:
            attempt = None if cursor.leases else order.next_attempt(order.read_waiting(cursor), plan.now_us)
            if attempt is not None and attempt >= attempts:
                plan.add_in_order(cursor, queue)
                return True
        elif plan.add_last(cursor, queue, attempts):
            return True
    return False
